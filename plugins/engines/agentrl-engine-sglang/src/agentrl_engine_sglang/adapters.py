"""What an SGLang server is started with for LoRA adapters."""

from typing import Any

from agentrl_core.api.engine import EngineContext
from agentrl_core.api.errors import EngineError
from agentrl_core.engine_kit.adapter_folders import places


def adapter_arguments(context: EngineContext) -> dict[str, Any]:
    """Arguments of ``sglang.launch_server`` for the adapters of this replica.

    Raises:
        EngineError: SGLang cannot be started for them.
    """
    slots = context.adapters
    if slots is None:
        return {}
    for name, value, why in (
        ("nodes", context.nodes, "adapters reach SGLang in files on one host"),
        ("data_parallel", context.data_parallel, "SGLang loads adapters into one copy of the model only"),
    ):
        if value > 1:
            raise EngineError(f"rollout.engine.{name}={value}: {why}; set it to 1, and have more replicas")
    return {
        "enable_lora": True,
        "max_lora_rank": slots.rank,
        "lora_target_modules": list(slots.targets),
        # Requests without an adapter take a place too.
        "max_loras_per_batch": places(slots) + 1,
        # A tensor that has no place in the server would otherwise be left out with a warning.
        "lora_strict_loading": True,
    }
