"""What async_sim.py runs in place of a model and a GPU: an engine with a number of slots whose answers take scripted
times, batch policies to compare with, and a clock that jumps from one timer to the next."""

import asyncio
import math
import random
import selectors
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, TypeVar, TypeVarTuple

from agentrl_core.api import (
    BatchPolicy,
    BatchPolicyContext,
    InferenceEngine,
    NoConfig,
    PipelineState,
    PolicySpan,
    SamplingParams,
    TokenOutput,
    WeightUpdate,
)
from agentrl_core.api.config import option
from agentrl_core.controller.event_loop import EventLoop

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
MEDIAN = 16
"""Tokens of a trajectory of median length."""
LONGEST = 32 * MEDIAN
SIGMA = math.log(4) / 1.6448536
"""Of a log-normal distribution whose 95th percentile is 4 times its median."""
MIXES = ("log-normal", "5% at 10x")


def tokens_of(mix: str, seed: str) -> int:
    """The length of a trajectory, the same for the same seed."""
    random_of = random.Random(seed)
    if mix == "log-normal":
        return min(max(round(MEDIAN * random_of.lognormvariate(0, SIGMA)), 1), LONGEST)
    return MEDIAN * 10 if random_of.random() < 0.05 else MEDIAN


@dataclass
class SlotConfig:
    """Options of the engine."""

    mix: str = option(MIXES[0], help="distribution of lengths")
    slots: int = option(1, ge=1, help="requests that run at once; others wait in the order in which they came")
    token_seconds: float = option(0.001, ge=0, unit="seconds", help="of one token of one request")


class SlotEngine(InferenceEngine):
    """Runs so many requests at once, each at the same rate whatever the others do. Requests go on under new weights."""

    config_class = SlotConfig
    capabilities = frozenset({"logprobs", "weight_update", "live_update"})

    def __init__(self, config: SlotConfig, context: object) -> None:
        self._config = config
        self._slots = asyncio.Semaphore(config.slots)
        self._version = 0
        self._running: dict[str, tuple[float, list[PolicySpan]]] = {}

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams,
        request_id: str,
        multi_modal: dict[str, Any] | None = None,
    ) -> TokenOutput:
        # train-<step>-<prompt>-<sample>-<attempt>
        length = tokens_of(self._config.mix, request_id.rsplit("-", 1)[0])
        async with self._slots:
            now = asyncio.get_running_loop().time
            spans = [PolicySpan(self._version, 0, length)]
            self._running[request_id] = now(), spans
            try:
                await asyncio.sleep(length * self._config.token_seconds)
            finally:
                del self._running[request_id]
        ids = [ord("a")] * (length - 1) + [sampling_params.stop_token_ids[0]]
        return TokenOutput(ids, [-0.5] * length, "stop", [span for span in spans if span.start < span.end])

    async def update_weights(self, update: WeightUpdate, version: int) -> None:
        self._version = version
        now = asyncio.get_running_loop().time()
        for begun, spans in self._running.values():
            last, length = spans[-1], spans[-1].end
            done = min(int((now - begun) / self._config.token_seconds), length)
            spans[-1:] = [PolicySpan(last.version, last.start, done), PolicySpan(version, done, length)]


class FirstEnded(BatchPolicy):
    """The count rule: limits how many groups may start, and trains whatever ended first."""

    def __init__(self, config: NoConfig, context: BatchPolicyContext) -> None:
        self._order: dict[int, None] = {}

    def admit(self, state: PipelineState) -> int:
        return state.allowed

    def select(self, state: PipelineState) -> Sequence[int] | None:
        ended = [group.position for group in state.groups if group.ended]
        self._order = {position: None for position in (*self._order, *ended) if position in set(ended)}
        return list(self._order)[: state.batch_size] if len(ended) >= state.batch_size else None


class InOrder(BatchPolicy):
    """Trains the groups in the order in which they started."""

    def __init__(self, config: NoConfig, context: BatchPolicyContext) -> None:
        pass

    def admit(self, state: PipelineState) -> int:
        return state.allowed

    def select(self, state: PipelineState) -> Sequence[int] | None:
        first = state.groups[: state.batch_size]
        ready = len(first) == state.batch_size and all(group.ended for group in first)
        return [group.position for group in first] if ready else None


class _Jumping(selectors.DefaultSelector):
    """Where a loop would wait for its next timer, its clock jumps there; while others work, it waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.may_jump: Callable[[], bool] = lambda: True

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if events or timeout == 0:
            return events
        if timeout is None or not self.may_jump():
            # Not for long: a thread that has ended wakes nobody.
            return list(super().select(None if timeout is None else 0.002))
        self.now += timeout
        return []


class _JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)
        self._jumping.may_jump = lambda: self.waited_for > 0 and not self._in_threads and not _foreign_threads()
        self.waited_for = 0
        """Coroutines that the trainer's thread waits for. While there are none, it computes, in no time."""
        self._in_threads = 0

    def time(self) -> float:
        return self._jumping.now

    def run_in_executor(self, executor: Executor | None, function: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        self._in_threads += 1
        future = super().run_in_executor(executor, function, *args)
        future.add_done_callback(self._came_back)
        return future

    def _came_back(self, _: object) -> None:
        self._in_threads -= 1


def _foreign_threads() -> bool:
    """Whether something computes that ``in_daemon_thread`` has started."""
    return any(thread.name == "agentrl-foreign-code" for thread in threading.enumerate())


class SimulatedTime(EventLoop):
    """An event loop in its own thread on whose clock only timers take time, so that no other load changes a result."""

    def __init__(self) -> None:
        super().__init__()
        self.in_background = True
        self._helper = self._jumping = _JumpingLoop()
        self._thread = threading.Thread(target=self._jumping.run_forever, name="simulated-time", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return super().run(self._waited_for(coroutine))

    async def _waited_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        # Counted in the loop's thread: it must not jump while the trainer's thread has what it waited for.
        self._jumping.waited_for += 1
        try:
            return await coroutine
        finally:
            self._jumping.waited_for -= 1
