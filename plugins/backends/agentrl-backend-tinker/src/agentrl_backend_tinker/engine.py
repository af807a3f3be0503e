"""An engine whose model is at a server of the Tinker API: each version of each adapter is a sampler there."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from agentrl_backend_tinker.config import TinkerEngineConfig
from agentrl_backend_tinker.connection import Connection, LostError
from agentrl_backend_tinker.messages import Sampled, sampled
from agentrl_backend_tinker.paths import path_of
from agentrl_core.api.engine import (
    EngineContext,
    InferenceEngine,
    MultiModal,
    PolicySpan,
    SamplingParams,
    TokenOutput,
)
from agentrl_core.api.errors import EngineError, WorkerError
from agentrl_core.api.weights import WeightUpdate
from agentrl_core.engine_kit.adapters import AdapterVersions
from agentrl_core.engine_kit.requests import check_request

logger = logging.getLogger(__name__)

WHERE = "rollout.engine.config"
TRIES = 5
"""Of a request, in case the server is lost again meanwhile."""


@dataclass
class Sampler:
    """Saved weights, or the base model, and the sampling session that serves them.

    Args:
        path: of the weights; empty: the base model.
        epoch: of the session that its id belongs to.
    """

    path: str
    epoch: int = 0
    sampler_id: str = ""
    numbers: "count[int]" = field(default_factory=count)
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)


class TinkerEngine(InferenceEngine):
    """Samples at the server. A request outlives its server: a new one gets it again, for nothing is trained here."""

    def __init__(self, config: TinkerEngineConfig, context: EngineContext) -> None:
        self._config = config
        self._context = context
        self._connection: Connection | None = None
        self._versions: AdapterVersions[Sampler] = AdapterVersions(context.adapters)
        self._own = Sampler("")
        self._version = 0
        self._base = ""
        self._running: dict[str, asyncio.Task[Sampled]] = {}
        self._aborted: set[str] = set()
        self._cancels: set[asyncio.Task[Any]] = set()
        self._counts = {"prompt_tokens": 0, "sampled_tokens": 0, "requests": 0}
        self._total = {"total_prompt_tokens": 0, "total_sampled_tokens": 0}

    async def start(self) -> None:
        self._connection = Connection(self._config, WHERE)
        await self._connection.open()
        self._base = await self._connection.base_model(self._config.base_model, self._context.model_path, WHERE)

    async def close(self) -> None:
        for task in [*self._running.values(), *self._cancels]:
            task.cancel()
        if self._connection is not None:
            await self._connection.close()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams,
        request_id: str,
        multi_modal: MultiModal | None = None,
    ) -> TokenOutput:
        context, params = self._context, sampling_params
        check_request(
            request_id, prompt_ids, params, multi_modal,
            vocab_size=context.vocab_size, max_model_len=context.max_model_len,
        )  # fmt: skip
        entry = self._versions.enter(params)
        try:
            sampler, version = (self._own, self._version) if entry is None else (entry.held, entry.version)
            prompt = [int(token) for token in prompt_ids]
            room = min(int(params.max_tokens), context.max_model_len - len(prompt))
            task = asyncio.ensure_future(self._sample(sampler, prompt, params, room))
            self._running[request_id] = task
            try:
                found = await task
            except asyncio.CancelledError:
                if request_id not in self._aborted:
                    raise
                return TokenOutput([], [], "abort")
            finally:
                task.cancel()
                self._running.pop(request_id, None)
                self._aborted.discard(request_id)
        finally:
            self._versions.leave(entry)
        tokens = found.tokens
        for name, number in (("prompt_tokens", len(prompt)), ("sampled_tokens", len(tokens))):
            self._counts[name] += number
            self._total[f"total_{name}"] += number
        return TokenOutput(
            tokens, found.log_probs, "stop" if found.stopped else "length", [PolicySpan(version, 0, len(tokens))]
        )

    async def _sample(self, sampler: Sampler, prompt: list[int], params: SamplingParams, room: int) -> Sampled:
        connection = self._connected
        asked = {
            "max_tokens": room, "temperature": float(params.temperature), "top_p": float(params.top_p),
            "top_k": int(params.top_k) or -1, "seed": None if params.seed is None else int(params.seed),
            "stop": [int(token) for token in params.stop_token_ids],
        }  # fmt: skip
        for tries in range(TRIES):
            epoch = connection.epoch
            promise = None
            try:
                await self._open(sampler)
                epoch = sampler.epoch
                body = {
                    "sampling_session_id": sampler.sampler_id, "seq_id": next(sampler.numbers), "num_samples": 1,
                    "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]}, "sampling_params": asked,
                }  # fmt: skip
                promise = await connection.post("asample", body)
                result = sampled(await connection.result(promise))
            except LostError as error:
                if tries == TRIES - 1:
                    what = f"the weights {sampler.path}" if sampler.path else f"the base model {self._base!r}"
                    raise EngineError(f"{connection.url} does not sample with {what}: {error}") from error
                await connection.open(epoch)
            except asyncio.CancelledError:
                if promise is not None:
                    self._cancel(promise["request_id"])
                raise
            else:
                if len(result.log_probs) != len(result.tokens):
                    raise EngineError(f"{connection.url} returned no log-probabilities of the tokens that it sampled")
                return result
        raise AssertionError("the last try returns or raises")

    async def _open(self, sampler: Sampler) -> None:
        """A sampling session for this sampler in the present session."""
        connection = self._connected
        async with sampler.opening:
            epoch = connection.epoch
            if sampler.epoch == epoch:
                return
            body: dict[str, Any] = {
                "session_id": connection.session_id, "sampling_session_seq_id": connection.next_number(),
                "type": "create_sampling_session",
            }  # fmt: skip
            # One of them: some servers refuse both.
            body |= {"model_path": sampler.path} if sampler.path else {"base_model": self._base}
            found = await connection.post("create_sampling_session", body)
            sampler.sampler_id, sampler.epoch = str(found["sampling_session_id"]), epoch
            sampler.numbers = count()

    def _cancel(self, request_id: str) -> None:
        """Let the server stop; whether it does is nobody's concern here."""

        async def cancel() -> None:
            try:
                await self._connected.post("cancel_future", {"request_id": request_id})
            except WorkerError as error:
                logger.debug("a request was not cancelled: %s", error)

        task = asyncio.ensure_future(cancel())
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)

    @property
    def _connected(self) -> Connection:
        if self._connection is None:
            raise EngineError("the engine was not started")
        return self._connection

    async def abort(self, request_id: str) -> TokenOutput | None:
        """The API gives nothing of a request that was cancelled."""
        task = self._running.get(request_id)
        if task is None:
            return None
        self._aborted.add(request_id)
        task.cancel()
        return TokenOutput([], [], "abort")

    async def update_weights(self, update: WeightUpdate, version: int) -> None:
        path = path_of(update)
        sampler = Sampler(path)
        if update.adapter is not None:
            names = () if self._context.adapters is None else self._context.adapters.names
            if update.adapter.name not in names:
                raise EngineError(
                    f"adapter {update.adapter.name!r}: the engine was started for {', '.join(names) or 'no adapters'}"
                )
        # Now, and not with the first request: what is wrong with these weights belongs to the update.
        await self._opened(sampler)
        if update.adapter is None:
            self._own, self._version = sampler, version
        else:
            self._versions.add(update.adapter.name, version, sampler)

    async def _opened(self, sampler: Sampler) -> None:
        connection = self._connected
        for tries in range(2):
            epoch = connection.epoch
            try:
                return await self._open(sampler)
            except LostError as error:
                if tries:
                    raise EngineError(f"{connection.url} does not have the weights {sampler.path}: {error}") from error
                await connection.open(epoch)

    async def progress(self) -> float:
        """Tries count: while the server restarts, another replica would not fare better."""
        return float(self._connected.requests)

    def metrics(self) -> dict[str, float]:
        """Tokens and requests since the last call, and tokens since the start."""
        requests = 0 if self._connection is None else self._connection.requests
        found = {**self._counts, "requests": requests - self._counts["requests"], **self._total}
        self._counts = {"prompt_tokens": 0, "sampled_tokens": 0, "requests": requests}
        return {name: float(value) for name, value in found.items()}
