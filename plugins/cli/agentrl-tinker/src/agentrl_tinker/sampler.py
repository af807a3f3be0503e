"""An engine that samples with many adapters.

An engine with the capability ``adapters`` has slots, each of which serves the weights of one sampler at a time. One of
this process without it samples with the trainer's module, with one adapter at a time: requests for another one wait
until those that run have ended.
"""

import asyncio
import json
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from agentrl_core.api.engine import AdapterSlots, EngineContext, InferenceEngine, SamplingParams, TokenOutput
from agentrl_core.api.errors import ConfigError
from agentrl_core.api.weights import Adapter, WeightUpdate
from agentrl_core.engine_kit.requests import check_request
from agentrl_core.plugins.resolution import resolve
from agentrl_core.workers.adapters import CONFIG_FILE, WEIGHTS_FILE
from agentrl_tinker.adapters import Adapters, Shape, read_adapter


@dataclass(frozen=True)
class Weights:
    """Weights of a sampler: an adapter in a folder, as PEFT saves it."""

    folder: Path
    shape: Shape


class Switch(Protocol):
    """Makes an engine ready to sample with some weights."""

    def using(self, weights: Weights | None) -> Any:
        """A context in which requests may be sent, with the fields of ``SamplingParams`` that they need."""


class Sampler:
    """Samples sequences; requests run concurrently, as far as the engine allows."""

    def __init__(self, engine: InferenceEngine, switch: Switch, context: EngineContext) -> None:
        self._engine = engine
        self._switch = switch
        self._context = context
        self._requests = count()

    @classmethod
    async def start(
        cls, engine_name: str, options: dict[str, Any], context: EngineContext, module: Any, slots: AdapterSlots
    ) -> "Sampler":
        """Start an engine.

        Args:
            engine_name: of ``rollout.engine.name``.
            options: of ``rollout.engine.config``.
            context: without module and slots.
            module: the trainer's, for an engine of this process that takes it.
            slots: of an engine with the capability ``adapters``.

        Raises:
            ConfigError: the engine can neither serve adapters nor sample with the trainer's module.
        """
        plugin = resolve("engine", engine_name)
        capabilities = plugin.spec.capabilities
        serves_adapters = "adapters" in capabilities
        if not serves_adapters and "shared_module" not in capabilities:
            raise ConfigError(f"--engine: {engine_name!r} has no capability 'adapters'. Use --engine hf")
        context = replace(context, adapters=slots) if serves_adapters else replace(context, shared_module=module)
        engine = plugin.build(_config_of(plugin.spec.config, options), context)
        await engine.start()
        return cls(engine, Slots(engine, slots) if serves_adapters else Turns(engine, Adapters(module)), context)

    async def generate(self, weights: Weights | None, prompt: Sequence[int], params: SamplingParams) -> TokenOutput:
        async with self._switch.using(weights) as fields:
            return await self._engine.generate(prompt, replace(params, **fields), f"tinker-{next(self._requests)}")

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
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def using(self, weights: Weights | None) -> AsyncIterator[dict[str, Any]]:
        if weights is None:
            yield {}
            return
        async with self._changed:
            await self._changed.wait_for(lambda: weights.folder in self._loaded or self._slot_is_free())
            if weights.folder not in self._loaded:
                await self._load(weights)
            self._loaded.move_to_end(weights.folder)
            self._running[weights.folder] = self._running.get(weights.folder, 0) + 1
            name, version = self._loaded[weights.folder]
        try:
            yield {"adapter": name, "version": version}
        finally:
            async with self._changed:
                self._running[weights.folder] -= 1
                if not self._running[weights.folder]:
                    del self._running[weights.folder]
                    self._changed.notify_all()

    def _slot_is_free(self) -> bool:
        return bool(self._free) or any(folder not in self._running for folder in self._loaded)

    async def _load(self, weights: Weights) -> None:
        if self._free:
            name = self._free.pop()
        else:
            idle = next(folder for folder in self._loaded if folder not in self._running)
            name, _ = self._loaded.pop(idle)
        version = next(self._versions)
        try:
            adapter = Adapter(name, json.loads((weights.folder / CONFIG_FILE).read_text()))
            update = WeightUpdate(files=(str(weights.folder / WEIGHTS_FILE),), adapter=adapter)
            await self._engine.update_weights(update, version)
        except BaseException:
            self._free.append(name)
            raise
        self._loaded[weights.folder] = (name, version)


class Turns:
    """An engine that samples with a module of this process, with one adapter at a time, in the order of requests."""

    LOADED = 8
    """Adapters that stay on the module."""

    def __init__(self, engine: InferenceEngine, adapters: Adapters) -> None:
        self._engine = engine
        self._adapters = adapters
        self._loaded: OrderedDict[Path, str] = OrderedDict()
        self._current: Path | None = None
        self._admitted: Path | None = None
        self._running = 0
        self._waiting: deque[tuple[Path | None, asyncio.Future[None]]] = deque()
        self._switching = asyncio.Lock()
        self._versions = count(1)

    @asynccontextmanager
    async def using(self, weights: Weights | None) -> AsyncIterator[dict[str, Any]]:
        folder = None if weights is None else weights.folder
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((folder, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if (folder, turn) in self._waiting:
                self._waiting.remove((folder, turn))
            elif not turn.cancelled():
                self._leave()
            raise
        try:
            async with self._switching:
                if self._current != folder:
                    await self._activate(weights)
                    self._current = folder
            yield {}
        finally:
            self._leave()

    def _admit(self) -> None:
        """The first who waits, once nobody runs with other weights, and those behind it that want the same."""
        while self._waiting:
            folder, turn = self._waiting[0]
            if self._running and folder != self._admitted:
                return
            self._waiting.popleft()
            if turn.cancelled():
                continue
            self._admitted = folder
            self._running += 1
            turn.set_result(None)

    def _leave(self) -> None:
        self._running -= 1
        self._admit()

    async def _activate(self, weights: Weights | None) -> None:
        """Nothing runs in the engine, whose thread therefore leaves the module alone."""
        await asyncio.to_thread(self._change, weights)
        await self._engine.update_weights(WeightUpdate(shared=True), next(self._versions))

    def _change(self, weights: Weights | None) -> None:
        if weights is None:
            self._adapters.activate(None)
            return
        if weights.folder not in self._loaded:
            if len(self._loaded) == self.LOADED:
                self._adapters.remove(self._loaded.popitem(last=False)[1])
            name = f"sampler-{next(self._versions)}"
            self._adapters.add(name, weights.shape)
            self._adapters.load(name, read_adapter(weights.folder))
            self._loaded[weights.folder] = name
        self._loaded.move_to_end(weights.folder)
        self._adapters.activate(self._loaded[weights.folder])


def _config_of(schema: Any, options: dict[str, Any]) -> Any:
    if schema is None:
        if options:
            raise ConfigError("--engine-option: this engine has no options")
        return None
    try:
        return schema(**options)
    except TypeError as error:
        raise ConfigError(f"--engine-option: {error}") from error
