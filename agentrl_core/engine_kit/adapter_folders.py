"""LoRA adapters for an engine that reads them from folders: one in memory for each version, with a name of its own.

Engines find cached prefixes by an adapter's name or folder, so neither ever comes again.
"""

import asyncio
import json
import logging
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from agentrl_core.api.engine import AdapterSlots, SamplingParams
from agentrl_core.api.errors import EngineError
from agentrl_core.api.weights import Adapter, WeightUpdate
from agentrl_core.engine_kit.adapters import AdapterVersion, AdapterVersions, check_adapter
from agentrl_core.engine_kit.memory_files import MemoryFolder, merged, write_safetensors

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AdapterFolder:
    """A version as PEFT saves it: ``adapter_model.safetensors`` and ``adapter_config.json``.

    Args:
        number: of the update that brought it, 1 for the first.
        path: of the folder, which stays while a request samples with it.
    """

    number: int
    path: Path

    @property
    def name(self) -> str:
        """By which the engine knows it."""
        return self.path.name


FolderVersion = AdapterVersion[AdapterFolder]
Call = Callable[[AdapterFolder], Awaitable[object]]


class AdapterFolders:
    """The adapters of one engine, and who samples with which version.

    Args:
        engine: its name, for folders and errors.
        slots: what it was started for; None: no adapters.
        modules: shape of each linear layer of the model, by name.
        load: makes the engine read a folder, and raises where it refuses.
        unload: makes the engine forget it.
    """

    def __init__(self, engine: str, slots: AdapterSlots | None, modules: Mapping[str, tuple[int, ...]],
                 load: Call, unload: Call) -> None:  # fmt: skip
        self._engine = engine
        self._slots = slots
        self._modules = modules
        self._load = load
        self._unload = unload
        self._versions: AdapterVersions[AdapterFolder] = AdapterVersions(slots)
        self._memory: MemoryFolder | None = None
        self._number = 0
        self._removals: set[asyncio.Task[None]] = set()

    async def update(self, update: WeightUpdate, version: int) -> None:
        """Take in a new version. Requests that run go on with theirs.

        Raises:
            EngineError: it is not one that this engine serves, or the engine refuses it; nothing has changed.
        """
        if update.adapter is not None and (update.shared or update.broadcast is not None):
            raise EngineError(
                f"adapter {update.adapter.name!r}: the {self._engine} engine takes adapters as buckets or files only"
            )
        adapter = await asyncio.to_thread(check_adapter, update, self._slots, self._modules)
        self._number += 1
        folder = AdapterFolder(self._number, self._parent(update) / f"{adapter.name}-{self._number}")
        try:
            await asyncio.to_thread(_write, folder.path, adapter, update)
            await self._load(folder)
        except Exception as error:
            shutil.rmtree(folder.path, ignore_errors=True)
            raise EngineError(f"adapter {adapter.name!r}: the {self._engine} engine refuses it: {error}") from error
        for entry in self._versions.add(adapter.name, version, folder):
            self._remove(entry)

    def enter(self, params: SamplingParams) -> FolderVersion | None:
        """A request begins, and :meth:`leave` must follow. Raises ValueError where there is no such version."""
        return self._versions.enter(params)

    def leave(self, entry: FolderVersion | None) -> None:
        """A request has ended."""
        if entry is not None and self._versions.leave(entry):
            self._remove(entry)

    def _parent(self, update: WeightUpdate) -> Path:
        if self._memory is None:
            versions = 1 if self._slots is None else places(self._slots)
            size = versions * sum(bucket.nbytes for bucket in update)
            self._memory = MemoryFolder(f"{self._engine}-adapters", size)
        return self._memory.path

    def _remove(self, entry: FolderVersion) -> None:
        task = asyncio.ensure_future(self._removed(entry.held))
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)

    async def _removed(self, folder: AdapterFolder) -> None:
        # A request that was aborted may be computed for one more step: the engine answers after that.
        try:
            await self._unload(folder)
        except Exception as error:  # noqa: BLE001 - an engine that has ended raises anything; the others forget it later
            logger.debug("adapter %s was not unloaded: %s", folder.name, error)
        finally:
            shutil.rmtree(folder.path, ignore_errors=True)

    def close(self) -> None:
        """Remove all folders. A second call does nothing."""
        for task in self._removals:
            task.cancel()
        if self._memory is not None:
            self._memory.close()


def places(slots: AdapterSlots) -> int:
    """How many versions there may be at a time: those that are kept, and of each adapter one that is dropped, but has
    requests: those of the newest must not wait for them."""
    return len(slots.names) * (slots.versions + 1)


def _write(folder: Path, adapter: Adapter, update: WeightUpdate) -> None:
    folder.mkdir()
    write_safetensors(folder / "adapter_model.safetensors", merged(list(update)))
    (folder / "adapter_config.json").write_text(json.dumps(dict(adapter.config), default=sorted))
