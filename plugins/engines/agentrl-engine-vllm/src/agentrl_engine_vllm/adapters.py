"""LoRA adapters as vLLM takes them."""

from typing import Any

from agentrl_core.api.engine import AdapterSlots
from agentrl_core.api.errors import EngineError
from agentrl_core.engine_kit.adapter_folders import AdapterFolder, places

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM can be started for."""


def adapter_arguments(slots: AdapterSlots | None, nodes: int) -> dict[str, Any]:
    """Arguments of ``AsyncEngineArgs`` for these adapters.

    Raises:
        EngineError: vLLM cannot be started for them.
    """
    if slots is None:
        return {}
    if nodes > 1:
        raise EngineError(
            f"rollout.engine.nodes={nodes}: adapters reach vLLM's workers in files on one host; set "
            "rollout.engine.nodes=1, and more replicas"
        )
    rank = next((each for each in RANKS if each >= slots.rank), None)
    if rank is None:
        raise EngineError(f"model.adapter.rank={slots.rank}: vLLM serves ranks up to {RANKS[-1]}; choose a lower one")
    count = places(slots)
    return {"enable_lora": True, "max_lora_rank": rank, "max_loras": count, "max_cpu_loras": count}


def lora_request(folder: AdapterFolder) -> Any:
    """A ``vllm.lora.request.LoRARequest``."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(folder.name, folder.number, str(folder.path))


def correct_rows_without_adapter() -> None:
    """In a worker on a CPU: rows of a batch that have no adapter compute the model alone.

    vLLM's operations for CPUs take the index -1, by which it means no adapter, for the last place. Where that has an
    adapter, they add it to all rows without one.

    Raises:
        RuntimeError: this version of vLLM has other operations.
    """
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    if not all(hasattr(module, "bgmv_shrink") for module in (lora_ops, punica_cpu)):
        raise RuntimeError("this version of vLLM computes adapters on a CPU in operations that agentrl does not know")
    shrink = lora_ops.bgmv_shrink

    def bgmv_shrink(inputs: Any, weights: Any, output: Any, indices: Any, scaling: float = 1.0) -> None:
        shrink(inputs, weights, output, indices, scaling)
        output.masked_fill_((indices < 0).unsqueeze(1), 0)

    # sgmv_shrink, for prompts, calls the one of its module.
    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = bgmv_shrink
