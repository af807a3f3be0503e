"""LoRA adapters in vLLM: a single one, which every request names, and whose content changes."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_core.api.errors import EngineError
from agentrl_core.api.weights import ArrayBucket, LoraAdapter, WeightUpdate
from agentrl_core.engine_kit.adapter_tensors import AdapterRules, adaptable_modules, tensor_names
from agentrl_core.engine_kit.memory_files import write_safetensors
from agentrl_core.engine_kit.model_tensors import ModelTensors
from agentrl_engine_vllm.weights import memory_folder

OPTION = "rollout.engine.config.max_lora_rank"
NAME, NUMBER = "policy", 1
"""Of the adapter that vLLM knows."""


class Adapters:
    """The adapter of one engine.

    A request of vLLM keeps the adapter that it named when it arrived. Here all name the same, so that what runs goes
    on with a new one, and without any: with one whose product is zero.

    Args:
        max_rank: the highest rank; 0 where vLLM is started without adapters.
        model: its tensors.
    """

    def __init__(self, max_rank: int, model: ModelTensors) -> None:
        self._max_rank = max_rank
        self._model = model
        self._rules = AdapterRules(max_rank, ())

    async def start(self, llm: Any) -> None:
        """Learn what vLLM can adapt, and begin without an adapter.

        Raises:
            EngineError: vLLM can adapt no layer of this model.
        """
        if not self._max_rank:
            return
        workers = await llm.collective_rpc("agentrl_adaptable", args=(adaptable_modules(self._model),))
        # A worker knows the layers of its pipeline stage.
        modules = sorted({name for names in workers for name in names})
        if not modules:
            raise EngineError(f"{OPTION}: vLLM can adapt no layer of this model; set it to 0")
        self._rules = AdapterRules(self._max_rank, modules, OPTION)
        await self.clear(llm)

    def check(self, update: WeightUpdate) -> None:
        """Whether this adapter can be taken.

        Raises:
            EngineError: with all that is wrong.
        """
        if update.adapter is not None and not self._max_rank:
            raise EngineError(
                f"the vllm engine was started without LoRA adapters: set {OPTION} to {update.adapter.rank} or more"
            )
        self._rules.check(update, self._model)

    def of_request(self) -> Any:
        """What every request must name: a ``LoRARequest``, or None."""
        # Nothing is read there, as the adapter is loaded already. Were it not, vLLM would fail rather than go without.
        return _lora_request(os.devnull, load_inplace=False) if self._max_rank else None

    async def load(self, llm: Any, update: WeightUpdate) -> None:
        """Put the adapter of an update in place of the one before, while nothing is computed."""
        if update.adapter is not None:
            await self._put(llm, update.adapter, list(update))

    async def clear(self, llm: Any) -> None:
        """From here on there is no adapter."""
        if self._max_rank:
            module = min(self._rules.modules)
            size_out, size_in = self._model.shapes[f"{module}.weight"]
            data = np.zeros(4 * (size_in + size_out), np.uint8)
            zero = ArrayBucket(tensor_names(module), ((1, size_in), (size_out, 1)), ("float32", "float32"), data)
            await self._put(llm, LoraAdapter(1, 1.0, (module,)), [zero])

    async def _put(self, llm: Any, adapter: LoraAdapter, buckets: list[ArrayBucket]) -> None:
        with memory_folder() as folder:
            await asyncio.to_thread(write_adapter, folder, adapter, buckets)
            # In place: requests that run name this number.
            if not await llm.add_lora(_lora_request(str(folder), load_inplace=True)):
                raise EngineError("vLLM has not taken the LoRA adapter")


def _lora_request(path: str, *, load_inplace: bool) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(NAME, NUMBER, path, load_inplace=load_inplace)


def write_adapter(folder: Path, adapter: LoraAdapter, buckets: list[ArrayBucket]) -> None:
    """An adapter as PEFT saves it."""
    merged = ArrayBucket(
        tuple(name for bucket in buckets for name in bucket.names),
        tuple(shape for bucket in buckets for shape in bucket.shapes),
        tuple(dtype for bucket in buckets for dtype in bucket.dtypes),
        np.concatenate([bucket.data for bucket in buckets]),
    )
    write_safetensors(folder / "adapter_model.safetensors", merged)
    config = {
        "peft_type": "LORA",
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "use_rslora": adapter.use_rslora,
        "target_modules": list(adapter.target_modules),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
