"""Routing of requests to engine replicas."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence

from agentrl_core.api import DeadlineError, EngineError, SamplingParams, TokenOutput, WorkerError
from agentrl_core.controller.runtime import ActorHandle

logger = logging.getLogger(__name__)


class AsyncLLMServerManager:
    """Sends each request to a replica: sticky by request id, the least loaded for a new one, another if one dies.

    Args:
        servers: handles of :class:`EngineServer` actors.
        turn_timeout: seconds that one request may take.
        max_model_len: tokens of prompt and response together.
        vocab_size: ids at or above it are refused.
        sessions: the engine wants to know when trajectories begin and end.
        max_sticky: remembered request ids; the oldest are forgotten.
    """

    def __init__(
        self,
        servers: Sequence[ActorHandle],
        *,
        turn_timeout: float,
        max_model_len: int,
        vocab_size: int,
        sessions: bool,
        max_sticky: int = 65536,
    ) -> None:
        self._servers = list(servers)
        self._in_flight = [0] * len(servers)
        self._assigned = [0] * len(servers)
        self._alive = [True] * len(servers)
        self._sticky: OrderedDict[str, int] = OrderedDict()
        self._turn_timeout = turn_timeout
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._sessions = sessions
        self._max_sticky = max_sticky

    async def generate(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> TokenOutput:
        """One request, within its deadline.

        Raises:
            EngineError: the request is impossible, or no replica could serve it.
            DeadlineError: ``rollout.turn_timeout`` passed.
        """
        self._check(prompt_ids, params)
        try:
            async with asyncio.timeout(self._turn_timeout) as deadline:
                return await self._generate(request_id, prompt_ids, params)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise DeadlineError(f"request {request_id}: no answer within {self._turn_timeout:g} s") from None

    async def _generate(self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams) -> TokenOutput:
        while True:
            home = self._sticky.get(request_id)
            index = self._route(request_id)
            self._in_flight[index] += 1
            try:
                if self._sessions and index != home:
                    await self._servers[index].call("open_session", request_id)
                output: TokenOutput = await self._servers[index].call("generate", prompt_ids, params, request_id)
                return output
            except WorkerError as error:
                self._lose(index, request_id, error)
            finally:
                self._in_flight[index] -= 1

    def _lose(self, index: int, request_id: str, error: WorkerError) -> None:
        self._alive[index] = False
        self._forget(request_id)
        logger.error("engine replica %d is gone, its requests move to the others: %s", index, error)
        if not any(self._alive):
            raise EngineError(f"no engine replica is alive; the last one: {error}") from error

    def _route(self, request_id: str) -> int:
        index = self._sticky.get(request_id)
        if index is not None and self._alive[index]:
            self._sticky.move_to_end(request_id)
            return index
        alive = [index for index, alive in enumerate(self._alive) if alive]
        if not alive:
            raise EngineError("no engine replica is alive")
        # Trajectories that have a home but wait on a tool break ties.
        index = min(alive, key=lambda candidate: (self._in_flight[candidate], self._assigned[candidate]))
        self._forget(request_id)
        self._sticky[request_id] = index
        self._assigned[index] += 1
        if len(self._sticky) > self._max_sticky:
            self._assigned[self._sticky.popitem(last=False)[1]] -= 1
        return index

    def _forget(self, request_id: str) -> int | None:
        index = self._sticky.pop(request_id, None)
        if index is not None:
            self._assigned[index] -= 1
        return index

    def _check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        total = len(prompt_ids) + params.max_tokens
        if not prompt_ids or params.max_tokens <= 0 or total > self._max_model_len:
            raise EngineError(
                f"a request with {len(prompt_ids)} prompt tokens and max_tokens={params.max_tokens} cannot be served: "
                f"both must be positive and fit the context of {self._max_model_len} tokens"
            )
        if max(prompt_ids) >= self._vocab_size or min(prompt_ids) < 0:
            raise EngineError(f"a prompt holds token ids outside 0..{self._vocab_size - 1}")

    async def open_session(self, session_id: str) -> None:
        """A trajectory begins.

        Raises:
            EngineError: no replica is alive.
        """
        while self._sessions:
            index = self._route(session_id)
            try:
                return await self._bounded(index, "open_session", session_id)
            except WorkerError as error:
                self._lose(index, session_id, error)

    async def close_session(self, session_id: str) -> None:
        """A trajectory has ended."""
        index = self._forget(session_id)
        if self._sessions and index is not None and self._alive[index]:
            await self._bounded(index, "close_session", session_id)

    async def _bounded(self, index: int, method: str, session_id: str) -> None:
        try:
            async with asyncio.timeout(self._turn_timeout) as deadline:
                await self._servers[index].call(method, session_id)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise DeadlineError(f"{method} of {session_id}: no answer within {self._turn_timeout:g} s") from None
