"""One engine behind one server: the same class runs in this process and as a Ray actor.

An engine's own interpreter imports this module: it and all that it imports do without torch and Ray.
"""

import asyncio
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentrl_core.api import (
    EngineContext,
    EngineError,
    InferenceEngine,
    MeasuredEngine,
    MultiModal,
    ProgressingEngine,
    SamplingParams,
    TokenOutput,
    WeightUpdate,
    WorkerError,
)
from agentrl_core.api.weights import Running
from agentrl_core.config.schema import OnNewWeights, ServedSlot
from agentrl_core.engine_kit.media import MediaCache, MissingImagesError
from agentrl_core.engine_kit.ports import free_port, host_address
from agentrl_core.engine_kit.requests import can_continue, joined, remaining, remaining_media
from agentrl_core.hosting.processes import family_memory
from agentrl_core.plugins.boundary import boundary, deadline, with_traceback

KEPT_IMAGES = 512 << 20
"""Bytes of the images that a server keeps for later turns."""
LOG_LINES = 30
LOG_TAIL_BYTES = 64 << 10


def _delegated(method: str, late: str = "") -> Callable[..., Coroutine[Any, Any, None]]:
    """The server's method that calls the engine's; with ``late`` WorkerError after ``start_timeout`` seconds, and where
    the engine fails and is not healthy any more."""

    async def call(self: "EngineServer", *args: Any) -> None:
        try:
            await self._ask(method, *args, late=late)
        except EngineError as error:
            if late:
                await self._examine(error)
            raise

    return call


class EngineServer:
    """Builds the engine of a slot and maps everything that it raises to :class:`EngineError`.

    Args:
        slot: the resolved engine slot of the configuration.
        context: what the run passes to this replica's engine.
        devices: GPUs of this host that the engine shall see; None: those that this process sees already.
    """

    def __init__(
        self,
        slot: ServedSlot,
        context: EngineContext,
        devices: Sequence[str] | None = None,
    ) -> None:
        self._images = MediaCache[bytes](KEPT_IMAGES, len)
        self._name = f"engine {slot.ref.name!r}, replica {context.replica}"
        if context.nodes > 1:
            self._name += f", host {context.node_rank} of {context.nodes}"
        if devices is not None:
            # Before anything asks CUDA.
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        self._log = RecentLog()
        self._slot = slot
        self._context = context
        self._made: InferenceEngine | None = None
        self._start_timeout = slot.start_timeout
        self._health_timeout = slot.health_timeout
        self._requests = RequestStats(slot.max_in_flight)
        # Requests enter the engine, except while an update ends those that run.
        self._enters = asyncio.Event()
        self._enters.set()
        self._restarts = 0
        self._continues = False

    def rendezvous(self) -> str:
        """``address:port`` of this host, where the servers of a replica on several hosts can find each other."""
        address = host_address()
        return f"{address}:{free_port(host=address)}"

    async def start(self, rendezvous: str = "") -> None:
        """Make the engine, start it, and see that it is healthy.

        Args:
            rendezvous: of host 0, where the replica has several.

        Raises:
            EngineError: it failed, or its deadline passed; with the last lines of its log.
        """
        model = Path(self._context.model_path)
        if model.is_absolute() and not model.exists():
            # Engines would take the path for the name of a repository, and complain about its form.
            raise EngineError(
                f"{self._name}: {model} does not exist on node {socket.gethostname()}. Every node of the cluster needs "
                "the model at this path"
            )
        late = f"{self._name} is not healthy after {self._start_timeout:g} s (start_timeout)."
        try:
            async with deadline(self._start_timeout, late, EngineError):
                with boundary(EngineError, f"{self._name}: start failed:", describe=with_traceback):
                    self._made = self._slot.build(replace(self._context, rendezvous=rendezvous))
                    await self._made.start()
                await self._ask("health")
        except EngineError as error:
            raise EngineError(f"{error}\nThe last lines of its log:\n{self._log.tail()}") from None

    @property
    def _engine(self) -> InferenceEngine:
        if self._made is None:
            raise EngineError(f"{self._name} has not been started")
        return self._made

    def process(self) -> tuple[int, tuple[str, ...]]:
        """This process's id and the files that its output goes to."""
        return os.getpid(), self._log.files()

    def memory(self) -> int | None:
        """Bytes of host memory of this process and those that it started, shared pages in parts; None off Linux."""
        return family_memory(os.getpid())

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        request_id: str,
        multi_modal: MultiModal | None = None,
    ) -> TokenOutput:
        """See :meth:`InferenceEngine.generate`; queues while ``max_in_flight`` requests are under way.

        Args:
            multi_modal: without data: images are those of :meth:`keep_images`.

        Raises:
            EngineError: the request failed.
            MissingImagesError: it needs images that this server does not have, or not any more.
            WorkerError: it failed, and the engine is not healthy either: this replica is of no use any more.
        """
        multi_modal = self._with_data(multi_modal)
        async with self._requests as queued:
            try:
                output = await self._generate(prompt_ids, params, request_id, multi_modal)
            except EngineError as error:
                await self._examine(error)
                raise
            self._requests.tokens += len(output.token_ids)
            output.queued += queued
            return output

    def keep_images(self, data: Mapping[str, bytes]) -> None:
        """Keep the files of images, by name, for the requests that follow."""
        for name, file in data.items():
            self._images.put(name, file)

    def _with_data(self, multi_modal: MultiModal | None) -> MultiModal | None:
        if multi_modal is None:
            return None
        found = {name: self._images.get(name) for name in multi_modal.images}
        if missing := [name for name, data in found.items() if data is None]:
            raise MissingImagesError(*missing)
        return replace(multi_modal, data={name: data for name, data in found.items() if data is not None})

    async def _generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, request_id: str, multi_modal: MultiModal | None
    ) -> TokenOutput:
        """Again, or from where it was, where new weights have ended it."""
        so_far: TokenOutput | None = None
        while True:
            while not self._enters.is_set():
                await self._enters.wait()
            restarts = self._restarts
            media = () if multi_modal is None else (remaining_media(multi_modal, so_far),)
            rest = remaining(prompt_ids, params, so_far)
            output: TokenOutput = await self._ask("generate", *rest, request_id, *media)
            whole = joined(so_far, output)
            if output.finish_reason != "abort" or restarts == self._restarts:
                return whole
            if self._continues and can_continue(params):
                if len(whole.token_ids) >= params.max_tokens:
                    return replace(whole, finish_reason="length")
                so_far = whole

    health = _delegated("health")
    open_session = _delegated("open_session")
    close_session = _delegated("close_session")
    sleep = _delegated("sleep", "has not fallen asleep")
    wake_up = _delegated("wake_up", "has not woken")

    def can_read(self, paths: Sequence[str]) -> bool:
        """Whether all these files are readable from here."""
        return all(os.access(path, os.R_OK) for path in paths)

    async def update_weights(self, update: WeightUpdate, version: int, on_running: OnNewWeights = "recompute") -> None:
        """See :meth:`InferenceEngine.update_weights`.

        Args:
            on_running: what becomes of requests that run, see ``rollout.on_new_weights``. With ``restart`` the server
                asks for them again; with an adapter and ``recompute`` for the rest of them.

        Raises:
            EngineError: the engine refuses the weights.
            WorkerError: it takes longer than ``start_timeout``, or fails and is not healthy any more.
        """
        start, runs = time.perf_counter(), self._requests.in_flight > 0
        try:
            if update.adapter is not None:
                await self._take_weights(update, version)
                if runs and on_running != "finish":
                    # They go on with the adapter's old version otherwise.
                    await self._end_running(continues=on_running != "restart")
            elif on_running == "restart" and runs:
                await self._update_alone(update, version)
            else:
                running: Running = "continue" if on_running == "continue" else "recompute"
                await self._take_weights(replace(update, running=running), version)
        finally:
            if runs:
                self._requests.paused(time.perf_counter() - start)

    _take_weights = _delegated("update_weights", "has not taken new weights")
    _pause = _delegated("pause", "has not ended its requests")
    _resume = _delegated("resume", "has not resumed")

    async def _update_alone(self, update: WeightUpdate, version: int) -> None:
        """Requests that run are ended, and begin again afterwards."""
        await self._end_running(False, lambda: self._take_weights(update, version))

    async def _end_running(self, continues: bool, then: Callable[[], Awaitable[None]] | None = None) -> None:
        """End the requests that run. When ``then`` is done they begin again, or go on after their tokens."""
        self._enters.clear()
        self._restarts += 1
        self._continues = continues
        try:
            await self._pause("abort")
            if then is not None:
                await then()
            await self._resume()
        finally:
            self._enters.set()

    async def progress(self) -> "Progress":
        """Whether something is computed, by the engine's own account or by what has been answered."""
        is_measured = isinstance(self._engine, ProgressingEngine)
        number = float(await self._ask("progress")) if is_measured else float(self._requests.answered)
        return Progress(number, self._requests.in_flight, is_measured)

    def metrics(self) -> dict[str, float]:
        """Counters of engine and server since the last call."""
        engine = self._engine
        return {**self._requests.take(), **(engine.metrics() if isinstance(engine, MeasuredEngine) else {})}

    async def close(self) -> None:
        """Close the engine."""
        try:
            if self._made is not None:
                await self._ask("close")
        finally:
            self._log.close()

    async def _examine(self, error: EngineError) -> None:
        """Raise WorkerError if the engine, which has failed with this error, is not healthy any more."""
        late = f"no answer within {self._health_timeout:g} s"
        with boundary(WorkerError, f"{self._name} is not healthy any more; {error}\nIts health check:"):
            async with deadline(self._health_timeout, late):
                await self._engine.health()

    async def _ask(self, method: str, *args: Any, late: str = "") -> Any:
        """Call the engine's method; with ``late`` it has ``start_timeout`` seconds."""
        if late:
            message = f"{self._name} {late} within {self._start_timeout:g} s"
            async with deadline(self._start_timeout, message, WorkerError):
                return await self._ask(method, *args)
        # As text: the class of a foreign exception may not exist in the caller's interpreter.
        with boundary(EngineError, lambda: f"{self._name}: {method} failed:", describe=with_traceback):
            return await getattr(self._engine, method)(*args)


@dataclass(frozen=True)
class Progress:
    """What a server has done so far.

    Args:
        number: changes while requests are computed.
        in_flight: requests that it has not answered.
        is_measured: the number is the engine's own; otherwise it is the number of answered requests.
    """

    number: float
    in_flight: int
    is_measured: bool


class RequestStats:
    """Counts the requests that wait for the engine, those that it serves, and the tokens that they get.

    ``async with`` holds one request, from its arrival to its answer.
    """

    def __init__(self, max_in_flight: int | None) -> None:
        self._slots = None if max_in_flight is None else asyncio.Semaphore(max_in_flight)
        self._waiting = self._running = 0
        self._busy_since = 0.0
        self.tokens = self.answered = 0
        self._reset()

    @property
    def in_flight(self) -> int:
        """Requests that wait or are served."""
        return self._waiting + self._running

    def _reset(self) -> None:
        self._max_waiting, self._max_running = self._waiting, self._running
        self._requests, self._serving_seconds, self.tokens, self._pause = 0, 0.0, 0, 0.0

    async def __aenter__(self) -> float:
        """A request has arrived; returns the seconds that it waited."""
        self._requests += 1
        queued = 0.0
        if self._slots is not None:
            start = time.perf_counter()
            queues = self._slots.locked()
            self._waiting += queues
            self._max_waiting = max(self._max_waiting, self._waiting)
            try:
                await self._slots.acquire()
            finally:
                self._waiting -= queues
            queued = time.perf_counter() - start if queues else 0.0
        if not self._running:
            self._busy_since = time.perf_counter()
        self._running += 1
        self._max_running = max(self._max_running, self._running)
        return queued

    async def __aexit__(self, *error: object) -> None:
        """It has been answered."""
        self.answered += 1
        self._running -= 1
        if not self._running:
            self._serving_seconds += time.perf_counter() - self._busy_since
        if self._slots is not None:
            self._slots.release()

    def paused(self, seconds: float) -> None:
        """No request got a token for so long."""
        self._pause = max(self._pause, seconds)

    def take(self) -> dict[str, float]:
        """``requests``; ``queue_max`` and ``running_max``, the most at once; ``generated_tokens`` in
        ``serving_seconds``, in which there was at least one request; ``pause_seconds``, the longest pause. Nothing
        where there was no request."""
        if not self._requests and not self._running:
            return {}
        now = time.perf_counter()
        if self._running:
            self._serving_seconds += now - self._busy_since
            self._busy_since = now
        taken = {
            "requests": float(self._requests),
            "queue_max": float(self._max_waiting),
            "running_max": float(self._max_running),
            "generated_tokens": float(self.tokens),
            "serving_seconds": self._serving_seconds,
            "pause_seconds": self._pause,
        }
        self._reset()
        return taken


class RecentLog(logging.Handler):
    """What a process wrote last: the end of the files that its output goes to, or else of its log records."""

    def __init__(self) -> None:
        super().__init__()
        self._records: deque[str] = deque(maxlen=LOG_LINES)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(self.format(record))

    def files(self) -> tuple[str, ...]:
        """Regular files behind standard output and error; Ray gives each worker its own. Nothing on a terminal."""
        found = (os.path.realpath(f"/proc/self/fd/{number}") for number in (1, 2))
        return tuple(dict.fromkeys(path for path in found if os.path.isfile(path)))

    def tail(self) -> str:
        """The last lines, those of processes that the engine started included where they share its output."""
        return tail_of(self.files()) or "\n".join(self._records) or "(it wrote nothing)"

    def close(self) -> None:
        logging.getLogger().removeHandler(self)
        super().close()


def tail_of(paths: Sequence[str], lines: int = LOG_LINES) -> str:
    """The last lines of these files together, the one that was written to last at the end."""
    texts: list[tuple[float, list[str]]] = []
    for path in map(Path, paths):
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(size - LOG_TAIL_BYTES, 0))
                text = file.read().decode(errors="replace")
            texts.append((path.stat().st_mtime, text.splitlines()))
        except OSError:
            continue
    return "\n".join([line for _, each in sorted(texts) for line in each if line.strip()][-lines:])
