"""Routing of requests to engine replicas."""

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl_core.api import DeadlineError, EngineError, MultiModal, SamplingParams, TokenOutput, WorkerError
from agentrl_core.config.schema import Retry
from agentrl_core.controller.runtime import ActorHandle
from agentrl_core.engine_kit.media import MediaSource, MissingImagesError
from agentrl_core.engine_kit.requests import can_continue, check_request, joined, remaining, remaining_media
from agentrl_core.plugins.boundary import within

logger = logging.getLogger(__name__)
MAX_LOSSES = 3
"""How many replicas may die under one request, or give it up, before it is blamed."""


@dataclass
class Replica:
    """One engine server as this router sees it."""

    server: ActorHandle
    is_alive: bool = True
    is_dropped: bool = False
    """Its owner has said that it is dead."""
    leaves: bool = False
    """Its owner lets it end: it takes no new requests."""
    in_flight: int = 0
    assigned: int = 0
    shown: set[str] = field(default_factory=set)
    """Images that :attr:`shown_to` was sent."""
    shown_to: ActorHandle | None = None
    sends_images: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def serves(self) -> bool:
        """Takes new requests."""
        return self.is_alive and not self.leaves


class AsyncLLMServerManager:
    """Sends each request to a replica: sticky by request id, the least loaded for a new one, another if one dies.

    A dead replica is left out until :meth:`put_server` brings it back, and so is a new one. One that leaves ends the
    requests that it has; the next turns of their trajectories go to others. If all are dead, requests wait for one to
    return, unless :meth:`give_up` has said that none will come back; no deadline runs meanwhile, see :meth:`outage`.

    A request whose time is over may be slow, or its replica may be frozen. The owner of the replicas finds out which:
    the request fails if the owner puts the same server back, and is repeated, once, if the server was replaced.

    Args:
        servers: handles of :class:`EngineServer` actors.
        turn_timeout: seconds that one request may take while there is a replica.
        max_model_len: tokens of prompt and response together.
        vocab_size: ids at or above it are refused.
        capabilities: of the engine. One with ``sessions`` is told when trajectories begin and end.
        restarts: dead replicas come back.
        retry: ``continue`` a request that was cut off after its sampled tokens, or ``restart`` it from its prompt.
        max_images: of a prompt, at most.
        media: the images of the run; None where the model takes text alone.
        max_sticky: remembered request ids; the oldest are forgotten.
        seed: of the choice among replicas with equal load, so that workers begin with different ones; None: the
            system's.
    """

    def __init__(
        self,
        servers: Sequence[ActorHandle],
        *,
        turn_timeout: float,
        max_model_len: int,
        vocab_size: int,
        capabilities: Collection[str],
        max_images: int = 0,
        media: MediaSource | None = None,
        restarts: bool = False,
        retry: Retry = "continue",
        max_sticky: int = 65536,
        seed: str | None = None,
    ) -> None:
        self._random = random.Random(seed)
        self._replicas = [Replica(server) for server in servers]
        self._sticky: OrderedDict[str, int] = OrderedDict()
        self._turn_timeout = turn_timeout
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._max_images = max_images
        self._media = media
        self._shown = {"shown": 0.0, "sent": 0.0, "sent_bytes": 0.0}
        self._capabilities = capabilities
        self._sessions = "sessions" in capabilities
        self._hopeless: str | None = None if restarts else "no engine replica is alive"
        self._retry = retry
        self._max_sticky = max_sticky
        self._changed = asyncio.Event()
        self._outages = 0.0
        self._down_since: float | None = None

    # Lost and restarted replicas -----------------------------------------------------------------------------

    def know(self, servers: Sequence[ActorHandle], leaving: Collection[int]) -> list[int]:
        """Learn the servers of all replicas, and which of them take no new requests; the numbers of those left out.

        New ones are left out until :meth:`put_server`.
        """
        new = servers[len(self._replicas) :]
        self._replicas += [Replica(server, is_alive=False) for server in new]
        for index in leaving:
            self._replicas[index].leaves = True
        return [index for index, replica in enumerate(self._replicas) if not replica.is_alive]

    def in_flight(self, index: int) -> int:
        """Requests that replica ``index`` has from here."""
        return self._replicas[index].in_flight if index < len(self._replicas) else 0

    def put_server(self, index: int, server: ActorHandle) -> None:
        """Replica ``index`` serves, or serves again, behind this handle. Unknown ones before it are left out."""
        self._replicas += [Replica(server, is_alive=False) for _ in range(len(self._replicas), index + 1)]
        self._replicas[index].server = server
        self._set_alive(index, True)

    def drop_server(self, index: int) -> None:
        """Replica ``index`` is dead, and is left out until :meth:`put_server`."""
        self._replicas[index].is_dropped = True
        self._set_alive(index, False)

    def give_up(self, reason: str) -> None:
        """No dead replica will come back: requests that find none alive fail with ``reason``."""
        self._hopeless = reason
        self._news()

    def outage(self) -> float:
        """Seconds so far in which no replica was up."""
        return self._outages + (0.0 if self._down_since is None else time.monotonic() - self._down_since)

    def _set_alive(self, index: int, is_alive: bool) -> None:
        replica = self._replicas[index]
        replica.is_alive = is_alive
        replica.is_dropped = replica.is_dropped and not is_alive
        if any(each.serves for each in self._replicas):
            self._outages, self._down_since = self.outage(), None
        elif self._down_since is None:
            self._down_since = time.monotonic()
        self._news()

    def _news(self) -> None:
        """Wake all that wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _is_replaced(self, index: int, server: ActorHandle) -> bool:
        """Wait until the owner has examined the replica behind this server; whether it was dead."""
        replica = self._replicas[index]
        if replica.server == server and replica.is_alive:
            self._set_alive(index, False)
        while not self._hopeless and replica.server == server and not replica.is_alive and not replica.is_dropped:
            await self._changed.wait()
        return replica.server != server or replica.is_dropped

    def _lose(self, index: int, server: ActorHandle, request_id: str, error: WorkerError) -> None:
        self._forget(request_id)
        replica = self._replicas[index]
        # A late failure of the process before says nothing about the one that took its place.
        if replica.server == server and replica.is_alive:
            self._set_alive(index, False)
            logger.error("lost engine replica %d, moving its requests to the others: %s", index, error)
        if self._hopeless and not any(each.serves for each in self._replicas):
            raise EngineError(f"{self._hopeless}; the last one: {error}") from error

    async def _route(self, request_id: str) -> int:
        while not any(replica.serves for replica in self._replicas):
            if self._hopeless:
                raise EngineError(self._hopeless)
            await self._changed.wait()
        index = self._sticky.get(request_id)
        if index is not None and self._replicas[index].serves:
            self._sticky.move_to_end(request_id)
            return index
        serving = [number for number, replica in enumerate(self._replicas) if replica.serves]
        # Trajectories that have a home but wait on a tool break ties.
        loads = {number: (self._replicas[number].in_flight, self._replicas[number].assigned) for number in serving}
        equal = [number for number, load in loads.items() if load == min(loads.values())]
        index = self._random.choice(equal) if len(equal) > 1 else equal[0]
        self._forget(request_id)
        self._sticky[request_id] = index
        self._replicas[index].assigned += 1
        if len(self._sticky) > self._max_sticky:
            self._replicas[self._sticky.popitem(last=False)[1]].assigned -= 1
        return index

    def _forget(self, request_id: str) -> int | None:
        index = self._sticky.pop(request_id, None)
        if index is not None:
            self._replicas[index].assigned -= 1
        return index

    # Requests ---------------------------------------------------------------------------------------------------

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        multi_modal: MultiModal | None = None,
    ) -> TokenOutput:
        """One request, within its deadline, whatever replicas it takes.

        Args:
            multi_modal: images of the prompt, without their data.

        Raises:
            EngineError: the request is impossible, or no replica could serve it.
            DeadlineError: ``rollout.turn_timeout`` passed, and not because the replica was frozen.
        """
        self._check(request_id, prompt_ids, params, multi_modal)
        for is_repeated in (False, True):
            asked: list[tuple[int, ActorHandle]] = []
            answer = self._generate(request_id, prompt_ids, params, multi_modal, asked)
            try:
                output: TokenOutput = await self._bounded(f"request {request_id}", answer)
                return output
            except DeadlineError:
                self._forget(request_id)
                if not asked or self._hopeless:
                    raise
                if not await self._is_replaced(*asked[-1]) or is_repeated:
                    raise
                logger.warning("request %s is repeated: engine replica %d was frozen", request_id, asked[-1][0])
        raise AssertionError("the loop returns or raises")

    async def _generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        multi_modal: MultiModal | None,
        asked: list[tuple[int, ActorHandle]],
    ) -> TokenOutput:
        """As :meth:`generate`; adds the replicas that were asked to ``asked``."""
        so_far: TokenOutput | None = None
        failures = 0
        while True:
            rest, media = remaining(prompt_ids, params, so_far), remaining_media(multi_modal, so_far)
            output = await self._attempt(request_id, *rest, media, asked)
            if output is not None:
                whole = joined(so_far, output)
                if output.finish_reason != "abort" or failures >= MAX_LOSSES:
                    return whole
                if self._retry == "continue" and can_continue(params):
                    so_far = whole
                    if len(whole.token_ids) >= params.max_tokens:
                        return replace(whole, finish_reason="length")
            failures += 1
            if failures > MAX_LOSSES:
                raise EngineError(
                    f"request {request_id} has lost {failures} engine replicas one after the other; it may be what "
                    f"kills them ({len(prompt_ids)} prompt tokens, {params})"
                )

    async def _attempt(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        multi_modal: MultiModal | None,
        asked: list[tuple[int, ActorHandle]],
    ) -> TokenOutput | None:
        """The answer of one replica; None if it died."""
        home = self._sticky.get(request_id)
        index = await self._route(request_id)
        replica = self._replicas[index]
        server = replica.server
        asked.append((index, server))
        replica.in_flight += 1
        try:
            if self._sessions and index != home:
                await server.call("open_session", request_id)
            if multi_modal is None:
                output: TokenOutput = await server.call("generate", prompt_ids, params, request_id)
            else:
                output = await self._show(replica, server, (prompt_ids, params, request_id), multi_modal)
            output.replica = index
            return output
        except WorkerError as error:
            self._lose(index, server, request_id, error)
            return None
        finally:
            replica.in_flight -= 1

    async def _show(
        self, replica: Replica, server: ActorHandle, request: tuple[Any, ...], multi_modal: MultiModal
    ) -> TokenOutput:
        """The answer to a request with images, each of which is sent to a server once."""
        self._shown["shown"] += len(multi_modal.images)
        for is_last in (False, True):
            await self._send_images(replica, server, multi_modal.images)
            try:
                output: TokenOutput = await server.call("generate", *request, multi_modal)
                return output
            except MissingImagesError as error:
                # It has a new process, or has let go of some that it had.
                replica.shown.difference_update(error.args)
                if is_last:
                    raise
        raise AssertionError("the loop returns or raises")

    async def _send_images(self, replica: Replica, server: ActorHandle, images: Sequence[str]) -> None:
        assert self._media is not None, "a run whose model takes images has them"
        # Samples of a prompt show the same images at the same time.
        async with replica.sends_images:
            if replica.shown_to != server:
                replica.shown, replica.shown_to = set(), server
            if names := [name for name in dict.fromkeys(images) if name not in replica.shown]:
                data = await self._media.get(names)
                await server.call("keep_images", data)
                self._shown["sent"] += len(data)
                self._shown["sent_bytes"] += sum(map(len, data.values()))
                replica.shown.update(names)

    def image_metrics(self) -> dict[str, float]:
        """Images of requests, and images and bytes that were sent to servers for them, since the last call."""
        counts = self._shown
        self._shown = dict.fromkeys(counts, 0.0)
        return counts

    def _check(
        self, request_id: str, prompt_ids: Sequence[int], params: SamplingParams, multi_modal: MultiModal | None
    ) -> None:
        limit, images = self._max_model_len, self._max_images
        try:
            check_request(
                request_id, prompt_ids, params, multi_modal, vocab_size=self._vocab_size, max_model_len=limit,
                max_images=images,
            )  # fmt: skip
        except ValueError as error:
            raise EngineError(str(error)) from error
        if len(prompt_ids) + params.max_tokens > limit:
            raise EngineError(
                f"request {request_id!r}: {len(prompt_ids)} prompt tokens and max_tokens={params.max_tokens} do not "
                f"fit the context of {limit} tokens"
            )
        if missing := sorted(params.capabilities.difference(self._capabilities)):
            raise EngineError(f"the engine has no {' and no '.join(missing)}: it lacks the capability of this name")

    # Sessions ---------------------------------------------------------------------------------------------------

    async def open_session(self, session_id: str) -> None:
        """A trajectory begins.

        Raises:
            EngineError: no replica is alive.
            DeadlineError: ``rollout.turn_timeout`` passed.
        """
        if self._sessions:
            await self._bounded(f"open_session of {session_id}", self._open_session(session_id))

    async def _open_session(self, session_id: str) -> None:
        while True:
            index = await self._route(session_id)
            server = self._replicas[index].server
            try:
                await server.call("open_session", session_id)
                return
            except WorkerError as error:
                self._lose(index, server, session_id, error)

    async def close_session(self, session_id: str) -> None:
        """A trajectory has ended."""
        index = self._forget(session_id)
        if self._sessions and index is not None and self._replicas[index].is_alive:
            call = self._replicas[index].server.call("close_session", session_id)
            await self._bounded(f"close_session of {session_id}", call)

    async def _bounded(self, what: str, call: Any) -> Any:
        late = lambda: f"{what}: no answer within {self._turn_timeout:g} s (rollout.turn_timeout)"  # noqa: E731
        return await within(self._turn_timeout, call, late, paused=self.outage)
