"""The boundary to code that is not ours: how long it may take, and which of our errors its failures become."""

import asyncio
import inspect
import logging
import os
import sys
import threading
import time
import traceback
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

import agentrl_core
from agentrl_core.api.errors import AgentRLError, DeadlineError

logger = logging.getLogger(__name__)
WAIT_SECONDS = 10.0
"""Interval between the lines that say what a start waits for."""
HANG_SECONDS = 60.0
"""A call that takes longer is reported, and again each time that this time has passed."""
PAUSED_LOOK_SECONDS = 0.01
"""Least interval between looks at a deadline that stands still."""
_TRACEBACK = "Traceback (most recent call last):"
_OURS = str(Path(agentrl_core.__file__).parent) + os.sep
T = TypeVar("T")
Message = str | Callable[[], str]
"""A message, or a function that composes it when it is needed."""


def described(failure: Exception) -> str:
    """``ValueError: text``, or, for an AgentRLError, its text and the traceback of the other process."""
    if isinstance(failure, AgentRLError):
        trace = getattr(failure, "trace", "")
        return f"{failure}\n{trace}" if trace else str(failure)
    return f"{type(failure).__name__}: {failure}" if str(failure) else type(failure).__name__


def with_traceback(failure: Exception) -> str:
    """The same and the traceback from foreign code on, for a process where the exception's class may not exist."""
    trace = traceback.format_exception(type(failure), failure, _foreign(failure.__traceback__))
    return f"{described(failure)}\n{''.join(trace)}"


def traced(failure: BaseException) -> str:
    """One traceback, of the exception that caused the failure and from foreign code on, and then what failed.

    The exceptions between the two say the same once more. An error that agentrl raised on purpose has its text only.
    """
    root = failure
    while cause := root.__cause__ or (None if root.__suppress_context__ else root.__context__):
        root = cause
    message, elsewhere = str(failure), getattr(root, "trace", "")
    if elsewhere and _TRACEBACK not in message:
        message += f"\n{elsewhere}"
    text, mark, trace = message.partition(f"\n{_TRACEBACK}")
    if mark:
        # It comes from another process, where the traceback was made.
        return f"{mark.lstrip()}{trace.rstrip()}\n{text}"
    if isinstance(root, AgentRLError):
        return f"{type(failure).__name__}: {failure}"
    trace = "".join(traceback.format_exception(type(root), root, _foreign(root.__traceback__), chain=False)).rstrip()
    return trace if root is failure else f"{trace}\n{failure}"


def _foreign(frames: TracebackType | None) -> TracebackType | None:
    """The frames below the last one of agentrl's; all of them where the last one is agentrl's."""
    inner, found = frames, frames
    while inner is not None:
        if inner.tb_frame.f_code.co_filename.startswith(_OURS):
            found = inner.tb_next
        inner = inner.tb_next
    return found or frames


class deadline:  # noqa: N801 - used like a function; a generator with @asynccontextmanager takes twice the time
    """Cancel the block after ``seconds``; a TimeoutError that the block itself raises passes unchanged.

    Args:
        paused: total seconds, so far, in which such deadlines stood still; their growth within the block is added to
            ``seconds``.

    Raises:
        AgentRLError: ``error`` with ``message``, because the time is over.
    """

    __slots__ = ("_check", "_error", "_message", "_paused", "_seconds", "_timer")

    def __init__(
        self,
        seconds: float,
        message: Message,
        error: type[AgentRLError] = DeadlineError,
        paused: Callable[[], float] | None = None,
    ) -> None:
        self._seconds = seconds
        self._message = message
        self._error = error
        self._paused = paused
        self._check: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        self._timer = asyncio.timeout(None if self._paused else self._seconds)
        await self._timer.__aenter__()
        if self._paused:
            loop = asyncio.get_running_loop()
            self._look(loop, loop.time() + self._seconds - self._paused(), self._paused)

    def _look(self, loop: asyncio.AbstractEventLoop, end: float, paused: Callable[[], float]) -> None:
        left = end + paused() - loop.time()
        if left > 0:
            # While the clock stands still there would be a look each moment.
            self._check = loop.call_later(max(left, PAUSED_LOOK_SECONDS), self._look, loop, end, paused)
        else:
            self._timer.reschedule(loop.time())

    async def __aexit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._check is not None:
            self._check.cancel()
        try:
            await self._timer.__aexit__(kind, failure, trace)
        except TimeoutError:
            raise self._error(_text(self._message)) from None


async def within(
    seconds: float,
    call: Awaitable[T],
    message: Message,
    error: type[AgentRLError] = DeadlineError,
    paused: Callable[[], float] | None = None,
) -> T:
    """What ``call`` returns, with the deadline from its first wait on: one that answers at once needs no timer.

    Most calls of tools, rewards and sessions within this process do, and a timer takes as long as a short tool.

    Raises:
        AgentRLError: as :class:`deadline`.
    """
    if not inspect.iscoroutine(call):
        async with deadline(seconds, message, error, paused):
            return await call
    try:
        awaited = call.send(None)
    except StopIteration as end:
        return cast(T, end.value)
    async with deadline(seconds, message, error, paused):
        return cast(T, await _rest(call, awaited))


@types.coroutine
def _rest(call: Coroutine[Any, Any, T], awaited: Any) -> Generator[Any, Any, T]:
    """Go on with a coroutine that has begun, and waits for ``awaited``."""
    while True:
        try:
            yield awaited
        except BaseException as failure:  # noqa: BLE001 - for the coroutine to handle
            try:
                awaited = call.throw(failure)
            except StopIteration as end:
                return cast(T, end.value)
        else:
            return (yield from call.__await__())


class boundary:  # noqa: N801 - as above
    """Turn what the block raises into ``error``: ``message``, followed by what ``describe`` returns for the exception.

    Errors of the class ``error`` or of ``keep`` pass unchanged. A DeadlineError keeps its text, which is complete.
    """

    __slots__ = ("_describe", "_error", "_keep", "_message")

    def __init__(
        self,
        error: type[AgentRLError],
        message: Message = "",
        *,
        keep: tuple[type[Exception], ...] = (),
        describe: Callable[[Exception], str] = described,
    ) -> None:
        self._error = error
        self._message = message
        self._keep = (error, *keep)
        self._describe = describe

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: object) -> None:
        if not isinstance(failure, Exception) or isinstance(failure, self._keep):
            return
        if isinstance(failure, DeadlineError):
            raise self._error(str(failure)) from failure
        cause = None if self._describe is with_traceback else failure
        raise self._error(f"{_text(self._message)} {self._describe(failure)}".lstrip()) from cause


async def in_daemon_thread(function: Callable[..., T], *args: object) -> T:
    """What ``function`` returns, run in a thread that nobody waits for when this coroutine or the process ends."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if outcome.cancelled():
            return
        if error is None:
            outcome.set_result(cast(T, value))
        else:
            outcome.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = function(*args)
        except BaseException as raised:  # noqa: BLE001 - handed on to whoever awaits it
            error = raised
        with suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name="agentrl-foreign-code", daemon=True).start()
    return await outcome


_blocks: dict[object, tuple[Message, int | None, float]] = {}
"""What runs in each block, since when; in which thread, or None where the block is a wait that is only reported."""
_reporter: threading.Thread | None = None
"""One for all blocks: a hook for each trajectory is too often for a thread each."""


@contextmanager
def hang_reported(what: str) -> Iterator[None]:
    """Log where the block stands while it hangs. Foreign code in this thread can be reported, but not stopped."""
    with _reported(what, threading.get_ident()):
        yield


def wait_reported(what: Message) -> AbstractContextManager[None]:
    """Log every ``WAIT_SECONDS`` what the block waits for, and for how long it has."""
    return _reported(what, None)


@contextmanager
def _reported(what: Message, thread: int | None) -> Iterator[None]:
    global _reporter
    block = object()
    _blocks[block] = (what, thread, time.monotonic())
    # After a fork the thread is gone.
    if _reporter is None or not _reporter.is_alive():
        _reporter = threading.Thread(target=_report_hangs, name="agentrl-hang-report", daemon=True)
        _reporter.start()
    try:
        yield
    finally:
        del _blocks[block]


def _report_hangs() -> None:
    reported: dict[object, float] = {}
    while True:
        time.sleep(min(1.0, HANG_SECONDS, WAIT_SECONDS))
        now, blocks = time.monotonic(), dict(_blocks)
        reported = {block: reported.get(block, start) for block, (_, _, start) in blocks.items()}
        for block, (what, thread, start) in blocks.items():
            if now - reported[block] < (WAIT_SECONDS if thread is None else HANG_SECONDS):
                continue
            reported[block] = now
            if thread is None:
                logger.info("waiting for %s (%.0f s so far)", _text(what), now - start)
            else:
                stack = "".join(traceback.format_stack(sys._current_frames().get(thread))[-3:])
                logger.warning(
                    "%s has not returned for %.0f s, and the run waits for it:\n%s", _text(what), now - start, stack
                )


def _text(message: Message) -> str:
    return message if isinstance(message, str) else message()
