"""LoRA adapters as vLLM takes them: a folder in memory for each version, under a name that no other version has.

vLLM finds cached prefixes by the name and the folder of an adapter, so neither may come again.
"""

import asyncio
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl_core.api.engine import AdapterSlots, SamplingParams
from agentrl_core.api.errors import EngineError
from agentrl_core.api.weights import Adapter, WeightUpdate
from agentrl_core.engine_kit.adapters import AdapterVersion, AdapterVersions, check_adapter
from agentrl_core.engine_kit.memory_files import MemoryFolder, merged, write_safetensors

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM can be started for."""


@dataclass(frozen=True)
class Loaded:
    """A version in vLLM.

    Args:
        number: by which vLLM knows it.
        folder: with ``adapter_model.safetensors`` and ``adapter_config.json``; vLLM may read it again at any time.
    """

    number: int
    folder: Path


Entry = AdapterVersion[Loaded]


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
    # A version that was dropped has its place until its last request ends: requests of the newest must not wait for it.
    count = len(slots.names) * (slots.versions + 1)
    return {"enable_lora": True, "max_lora_rank": rank, "max_loras": count, "max_cpu_loras": count}


class Adapters:
    """The adapters of one vLLM, and who samples with which version.

    Args:
        slots: what it is started for.
        modules: shape of each linear layer of the model, by name.
    """

    def __init__(self, slots: AdapterSlots | None, modules: Mapping[str, tuple[int, ...]]) -> None:
        self._slots = slots
        self._modules = modules
        self._versions: AdapterVersions[Loaded] = AdapterVersions(slots)
        self._memory: MemoryFolder | None = None
        self._number = 0
        self._removals: set[asyncio.Task[None]] = set()

    async def load(self, llm: Any, update: WeightUpdate, version: int) -> None:
        """Take in a new version. Requests that run go on with theirs.

        Raises:
            EngineError: it is not one that this engine serves, or vLLM refuses it; nothing has changed.
        """
        adapter = await asyncio.to_thread(check_adapter, update, self._slots, self._modules)
        if update.broadcast is not None:
            raise EngineError(f"adapter {adapter.name!r}: the vllm engine takes adapters as buckets or files only")
        self._number += 1
        loaded = Loaded(self._number, self._folder(update) / f"{adapter.name}-{self._number}")
        await asyncio.to_thread(_write, loaded.folder, adapter, update)
        try:
            await llm.add_lora(lora_request(adapter.name, loaded))
        except Exception as error:
            shutil.rmtree(loaded.folder, ignore_errors=True)
            raise EngineError(f"adapter {adapter.name!r}: vLLM refuses it: {error}") from error
        for entry in self._versions.add(adapter.name, version, loaded):
            self._remove(llm, entry)

    def enter(self, params: SamplingParams) -> Entry | None:
        """A request begins, and :meth:`leave` must follow. Raises ValueError where there is no such version."""
        return self._versions.enter(params)

    def leave(self, llm: Any, entry: Entry | None) -> None:
        """A request has ended."""
        if entry is not None and self._versions.leave(entry):
            self._remove(llm, entry)

    def _folder(self, update: WeightUpdate) -> Path:
        if self._memory is None:
            size = sum(bucket.nbytes for bucket in update)
            slots = self._slots
            count = 1 if slots is None else len(slots.names) * (slots.versions + 1)
            self._memory = MemoryFolder("vllm-adapters", size * count)
        return self._memory.path

    def _remove(self, llm: Any, entry: Entry) -> None:
        """Not at once: a request that was aborted may be computed for one more step."""
        task = asyncio.ensure_future(self._removed(llm, entry.held))
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)

    async def _removed(self, llm: Any, loaded: Loaded) -> None:
        try:
            # It answers after what was said to vLLM before, such as that the last request has ended.
            await llm.remove_lora(loaded.number)
        finally:
            shutil.rmtree(loaded.folder, ignore_errors=True)

    def close(self) -> None:
        """Remove all folders. A second call does nothing."""
        for task in self._removals:
            task.cancel()
        if self._memory is not None:
            self._memory.close()


def lora_request(name: str, loaded: Loaded) -> Any:
    """A ``vllm.lora.request.LoRARequest``."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"{name}-{loaded.number}", loaded.number, str(loaded.folder))


def _write(folder: Path, adapter: Adapter, update: WeightUpdate) -> None:
    folder.mkdir()
    write_safetensors(folder / "adapter_model.safetensors", merged(list(update)))
    (folder / "adapter_config.json").write_text(json.dumps(dict(adapter.config), default=sorted))
