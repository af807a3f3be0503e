"""Results that clients come back for, and the order in which a model's requests run."""

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from agentrl_core.api.errors import AgentRLError
from agentrl_tinker.refusals import Refusal

logger = logging.getLogger(__name__)

Result = bytes | dict[str, object]
"""Bytes are a protobuf message, anything else is JSON."""
Work = Callable[[], Awaitable[Result]]

FETCHED = 2048
"""Results that stay after they were fetched, in case the answer got lost on its way."""
AHEAD = 4096
"""Requests of a model that may wait for an earlier one."""


class Results:
    """By request id, each for the key that made the request.

    Args:
        alive: called with the session of a client that asks for a result.
    """

    def __init__(self, alive: Callable[[str], None]) -> None:
        self._alive = alive
        self._tasks: dict[str, tuple[str, str, asyncio.Future[Result], bytes]] = {}
        self._fetched: OrderedDict[str, None] = OrderedDict()
        self.stopping: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        """Done when the server ends: nobody shall wait any more."""

    def add(self, request_id: str, owner: str, session_id: str, asked: object = None) -> "asyncio.Future[Result]":
        """The future that gets the result.

        Args:
            asked: the request, for ``known``.
        """
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._tasks[request_id] = (owner, session_id, future, _digest(repr(asked).encode()))
        return future

    def known(self, request_id: str, asked: object) -> bool:
        """Whether this request is here already: a client sends again what got no answer.

        Raises:
            Refusal: another request has this id.
        """
        if request_id not in self._tasks:
            return False
        if self._tasks[request_id][-1] != _digest(repr(asked).encode()):
            raise Refusal(f"request {request_id} was another one; a client counts up the number of each request")
        return True

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._tasks

    def __len__(self) -> int:
        return len(self._tasks)

    async def wait(self, request_id: str, owner: str, seconds: float) -> Result | None:
        """The result, None while there is none.

        Raises:
            Refusal: the key has made no such request.
        """
        of, session_id, future, _ = self._tasks.get(request_id, ("", "", None, b""))
        if future is None or of != owner:
            raise Refusal(
                f"there is no request {request_id!r} of this API key; the server may have been restarted since", 404
            )
        self._alive(session_id)
        await asyncio.wait([future, self.stopping], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            return None
        self._fetched[request_id] = None
        self._fetched.move_to_end(request_id)
        while len(self._fetched) > FETCHED:
            self._tasks.pop(self._fetched.popitem(last=False)[0], None)
        return future.result()

    def drop_session(self, session_id: str) -> None:
        for request_id in [key for key, (_, of, *_) in self._tasks.items() if of == session_id]:
            self._fetched.pop(request_id, None)
            future = self._tasks.pop(request_id)[2]
            if not future.done():
                future.set_result(failed(Refusal("the session has ended")))


def _digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()


def failed(error: BaseException) -> dict[str, object]:
    """What a client gets for a request that failed."""
    is_users = isinstance(error, Refusal | ValueError)
    text = str(error) if isinstance(error, AgentRLError | ValueError) else f"{type(error).__name__}: {error}"
    return {"error": text, "category": "user" if is_users else "server"}


async def finish(future: "asyncio.Future[Result]", work: Work) -> None:
    """Run a request and set its result, whatever it raises."""
    try:
        result = await work()
    except Exception as error:  # noqa: BLE001 - a client's request must not end the server
        if not isinstance(error, Refusal):
            logger.warning("a request failed", exc_info=error)
        result = failed(error)
    if not future.done():
        future.set_result(result)


class Ordered:
    """Runs requests in the order of their numbers, 1, 2, 3, whatever the order is in which they come."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._next = 1
        self._waiting: dict[int, tuple[asyncio.Future[Result] | None, Work | None]] = {}
        self._seen: OrderedDict[int, bytes] = OrderedDict()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def known(self, number: int, body: bytes) -> bool:
        """Whether this request is here already: a client sends again what got no answer.

        Raises:
            Refusal: another request has this number, or too many wait.
        """
        digest = _digest(body)
        if number in self._seen:
            if self._seen[number] != digest:
                raise Refusal(f"seq_id: {self._name} has another request with the number {number}")
            return True
        # While the model is made, its number is 0.
        if number < (expected := max(self._next, 1)):
            raise Refusal(f"seq_id: {self._name} expects {expected} or a later number, found {number}")
        if number >= self._next + AHEAD:
            raise Refusal(f"seq_id: {number} is too far ahead, {self._name} waits for {self._next}", 429)
        self._seen[number] = digest
        while len(self._seen) > 2 * AHEAD:
            self._seen.popitem(last=False)
        return False

    def start(self, future: "asyncio.Future[Result]", work: Work) -> None:
        """Run this before all others."""
        self._next = 0
        self.add(0, future, work)

    def add(self, number: int, future: "asyncio.Future[Result] | None", work: Work | None) -> None:
        """Run this in its turn; None for a request that was refused, whose number is used up."""
        self._waiting[number] = (future, work)
        if self._task is None and not self._closed and self._next in self._waiting:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while not self._closed and self._next in self._waiting:
            future, work = self._waiting.pop(self._next)
            if future is not None and work is not None:
                await finish(future, work)
            self._next += 1
        self._task = None

    async def close(self) -> None:
        """Let what runs end, and run nothing more."""
        self._closed = True
        if self._task is not None and self._task is not asyncio.current_task():
            await asyncio.wait([self._task])
