"""The embedded engine: a transformers model that samples in a thread of the process that holds it."""

import asyncio
import contextlib
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from typing import TypeVar

from agentrl_core.api.engine import (
    EngineContext,
    InferenceEngine,
    MultiModal,
    PauseMode,
    SamplingParams,
    TokenOutput,
    WeightUpdate,
)
from agentrl_core.api.errors import EngineError
from agentrl_core.engine_kit.requests import check_request
from agentrl_engine_hf.config import HFEngineConfig
from agentrl_engine_hf.counters import Counters
from agentrl_engine_hf.executor import Executor
from agentrl_engine_hf.images import ImageReader
from agentrl_engine_hf.model import Model
from agentrl_engine_hf.sampler import mix
from agentrl_engine_hf.sequence import Sequence
from agentrl_engine_hf.thread import EngineThread
from agentrl_engine_hf.threads import use_cpu_threads

T = TypeVar("T")


class HFEngine(InferenceEngine):
    """Continuous batching over a transformers model with full attention, on CPU or GPU.

    Requests join the running batch and leave it one by one. Between the turns of a session its keys and values stay,
    so that the next turn computes only what is new; the sessions idle longest make room. Requests may come from any
    event loop.

    With ``context.shared_module`` the engine generates with the actor's module itself: it copies nothing, and while
    nothing runs, or during a pause, the module is in the training mode that the actor left it in.

    With ``context.deterministic`` a step is made only when every open session has a request here, in a fixed order:
    the same requests give the same bits. All sessions of a rollout must be opened before its first request.
    """

    def __init__(self, config: HFEngineConfig, context: EngineContext) -> None:
        self._config = config
        self._context = context
        self._counters = Counters()
        self._thread: EngineThread | None = None
        self._vocab_size = 0
        self._images: ImageReader | None = None
        self._unseeded = 0

    # Life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Raises EngineError where the model cannot be loaded or served."""
        self._thread = EngineThread(self._make_executor, f"agentrl-engine-hf-{self._context.replica}")
        await asyncio.wrap_future(self._thread.started)

    def _make_executor(self) -> Executor:
        model = Model(self._context, self._config.attn_implementation, self._config.record_decode)
        # Before anything is computed: OpenMP keeps a pool of threads that has once been made.
        use_cpu_threads(model.module, self._config.cpu_threads)
        self._vocab_size = min(model.vocab_size, self._context.vocab_size or model.vocab_size)
        self._images = model.images
        return Executor(model, self._config, self._context, self._counters)

    async def close(self) -> None:
        if self._thread is not None:
            self._thread.stop()
            await asyncio.to_thread(self._thread.join)

    async def health(self) -> None:
        """Raises EngineError when the engine's thread has ended."""
        await self._call(lambda executor: None)

    async def progress(self) -> float:
        """Steps so far, as the engine's thread says between two of them."""
        return await self._call(lambda executor: self._counters.steps)

    def metrics(self) -> dict[str, float]:
        """``prompt_tokens`` (``cached_tokens`` of them not computed again), ``steps`` and ``busy_seconds``."""
        return self._counters.take()

    # Generation ---------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: SequenceOf[int],
        sampling_params: SamplingParams,
        request_id: str,
        multi_modal: MultiModal | None = None,
    ) -> TokenOutput:
        """Raises ValueError for a request that cannot be served; others are not affected."""
        thread = self._running_thread()
        sequence = self._sequence(prompt_ids, sampling_params, request_id, multi_modal)
        if self._images is not None:
            # Decoding and resizing images takes longer than a step.
            reading = asyncio.to_thread(self._images.read, request_id, sequence.ids, multi_modal)
            sequence.pictures = await reading
        thread.post(lambda executor: executor.submit(sequence))
        try:
            return await asyncio.wrap_future(sequence.future)
        except asyncio.CancelledError:
            with contextlib.suppress(EngineError):
                thread.post(lambda executor: executor.drop(sequence))
            raise

    def _sequence(
        self,
        prompt_ids: SequenceOf[int],
        params: SamplingParams,
        request_id: str,
        multi_modal: MultiModal | None,
    ) -> Sequence:
        ids = [int(token) for token in prompt_ids]
        check_request(
            request_id,
            ids,
            params,
            multi_modal,
            vocab_size=self._vocab_size,
            max_model_len=self._context.max_model_len,
            max_images=self._context.max_images,
        )
        future: Future[TokenOutput] = Future()
        # From here on only the engine's thread ends the future, so that cancelling it cannot race with a result.
        future.set_running_or_notify_cancel()
        return Sequence(
            request_id=request_id,
            ids=ids,
            prompt_length=len(ids),
            max_length=min(len(ids) + params.max_tokens, self._context.max_model_len),
            params=params,
            seed=self._next_seed() if params.seed is None else params.seed,
            future=future,
            stop_ids=frozenset(params.stop_token_ids),
        )

    def _next_seed(self) -> int:
        self._unseeded += 1
        return mix(self._context.seed, self._context.replica, self._unseeded)

    # Between steps ------------------------------------------------------------------------------------------------

    async def open_session(self, session_id: str) -> None:
        await self._call(lambda executor: executor.open_session(session_id))

    async def close_session(self, session_id: str) -> None:
        await self._call(lambda executor: executor.close_session(session_id))

    async def abort(self, request_id: str) -> TokenOutput | None:
        return await self._call(lambda executor: executor.abort(request_id))

    async def update_weights(self, update: WeightUpdate, version: int) -> None:
        """Raises EngineError, and changes nothing, where the tensors are not the model's.

        Requests that run, or are paused with ``keep``, go on from their ids with the new weights.
        """
        await self._call(lambda executor: executor.update_weights(update, version))

    async def pause(self, mode: PauseMode = "keep") -> None:
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()
        await self._call(lambda executor: executor.pause(mode, done))
        await asyncio.wrap_future(done)

    async def resume(self) -> None:
        await self._call(lambda executor: executor.resume())

    async def sleep(self, level: int = 1) -> None:
        """Level 2 moves the engine's own weights to the host's memory; a shared module stays where it is.

        Requests wait until :meth:`wake_up`.
        """
        await self._call(lambda executor: executor.sleep(level))

    async def wake_up(self, tags: SequenceOf[str] | None = None) -> None:
        names = {"weights", "kv_cache"} if tags is None else set(tags)
        await self._call(lambda executor: executor.wake_up(names))

    def _running_thread(self) -> EngineThread:
        if self._thread is None:
            raise EngineError("the hf engine has not been started: call start() first")
        return self._thread

    async def _call(self, command: Callable[[Executor], T]) -> T:
        return await asyncio.wrap_future(self._running_thread().call(command))
