"""An engine that samples with many adapters: weights of samplers take turns in its slots."""

import asyncio
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from agentrl_core.api.engine import AdapterSlots, EngineContext, InferenceEngine, SamplingParams, TokenOutput
from agentrl_core.api.errors import ConfigError
from agentrl_core.api.weights import Adapter, WeightUpdate
from agentrl_core.engine_kit.requests import check_request
from agentrl_core.fsdp2.adapters import CONFIG_FILE, WEIGHTS_FILE
from agentrl_core.plugins.resolution import resolve
from agentrl_tinker.adapters import Shape


@dataclass(frozen=True)
class Weights:
    """Weights of a sampler: an adapter in a folder, as PEFT saves it."""

    folder: Path
    shape: Shape


class Sampler:
    """Samples sequences; requests run concurrently, as far as the engine allows."""

    def __init__(self, engine: InferenceEngine, slots: "Slots", context: EngineContext) -> None:
        self._engine = engine
        self._slots = slots
        self._context = context
        self._requests = count()

    @classmethod
    async def start(cls, engine_name: str, options: dict[str, Any], context: EngineContext) -> "Sampler":
        """Start an engine.

        Args:
            engine_name: of ``rollout.engine.name``.
            options: of ``rollout.engine.config``.
            context: with slots for adapters.

        Raises:
            ConfigError: the engine cannot serve adapters.
        """
        plugin = resolve("engine", engine_name)
        if "adapters" not in plugin.spec.capabilities or context.adapters is None:
            raise ConfigError(f"--engine: {engine_name!r} has no capability 'adapters'. Use --engine hf")
        engine = plugin.build(_config_of(plugin.spec.config, options), context)
        await engine.start()
        return cls(engine, Slots(engine, context.adapters), context)

    async def generate(self, weights: Weights | None, prompt: Sequence[int], params: SamplingParams) -> TokenOutput:
        async with self._slots.using(weights) as fields:
            return await self._engine.generate(prompt, replace(params, **fields), f"tinker-{next(self._requests)}")

    async def try_out(self, weights: Weights) -> None:
        """Load weights into a slot. Raises EngineError where the engine refuses them."""
        async with self._slots.using(weights):
            pass

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """Raises ValueError for what the engine would not sample."""
        check_request(
            "of asample", prompt, params, vocab_size=self._context.vocab_size, max_model_len=self._context.max_model_len
        )

    async def close(self) -> None:
        await self._engine.close()


class Slots:
    """An engine that serves several adapters at once: weights move into the slot that was idle longest."""

    def __init__(self, engine: InferenceEngine, slots: AdapterSlots) -> None:
        self._engine = engine
        self._free = list(slots.names)
        self._loaded: OrderedDict[Path, tuple[str, int]] = OrderedDict()
        self._running: dict[Path, int] = {}
        self._versions = count(1)
        self._lock = asyncio.Lock()
        self._idle = asyncio.Event()
        self._wanted: dict[Path, Path] = {}
        """Weights that wait for a slot, and those that take no new requests until they are idle and give theirs."""

    @asynccontextmanager
    async def using(self, weights: Weights | None) -> AsyncIterator[dict[str, Any]]:
        if weights is None:
            yield {}
            return
        try:
            while not await self._enter(weights):
                await self._idle.wait()
        except BaseException:
            self._wanted.pop(weights.folder, None)
            raise
        name, version = self._loaded[weights.folder]
        try:
            yield {"adapter": name, "version": version}
        finally:
            # Nothing to wait for: a request may be cancelled twice.
            self._running[weights.folder] -= 1
            if not self._running[weights.folder]:
                del self._running[weights.folder]
                self._idle.set()
                self._idle.clear()

    async def _enter(self, weights: Weights) -> bool:
        """Whether the weights have a slot, and the request that asks counts as one that uses them."""
        folder = weights.folder
        async with self._lock:
            if folder not in self._loaded and (self._free or self._idle_ones()):
                await self._load(weights)
            if folder in self._loaded and (folder not in self._wanted.values() or self._idle_ones()):
                self._loaded.move_to_end(folder)
                self._running[folder] = self._running.get(folder, 0) + 1
                return True
            taken = self._wanted.values()
            if folder not in self._wanted and (others := [each for each in self._loaded if each not in taken]):
                self._wanted[folder] = others[0]
        return False

    def _idle_ones(self) -> list[Path]:
        return [folder for folder in self._loaded if folder not in self._running]

    async def _load(self, weights: Weights) -> None:
        if self._free:
            name = self._free.pop()
        else:
            idle = self._idle_ones()[0]
            name, _ = self._loaded.pop(idle)
            self._wanted = {each: slot for each, slot in self._wanted.items() if slot != idle}
        self._wanted.pop(weights.folder, None)
        version = next(self._versions)
        try:
            adapter = Adapter(name, json.loads((weights.folder / CONFIG_FILE).read_text()))
            update = WeightUpdate(files=(str(weights.folder / WEIGHTS_FILE),), adapter=adapter)
            await self._engine.update_weights(update, version)
        except BaseException:
            self._free.append(name)
            raise
        self._loaded[weights.folder] = (name, version)


def _config_of(schema: Any, options: dict[str, Any]) -> Any:
    if schema is None:
        if options:
            raise ConfigError("--engine-option: this engine has no options")
        return None
    try:
        return schema(**options)
    except TypeError as error:
        raise ConfigError(f"--engine-option: {error}") from error
