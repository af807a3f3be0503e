"""The boundary to code that is not ours: how long it may take, and which of our errors its failures become."""

import asyncio
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import TracebackType

import agentrl_core
from agentrl_core.api.errors import AgentRLError, DeadlineError

logger = logging.getLogger(__name__)
HANG_SECONDS = 60.0
"""A call that takes longer is reported, and again each time that this time has passed."""
_TRACEBACK = "Traceback (most recent call last):"
_OURS = str(Path(agentrl_core.__file__).parent) + os.sep
Message = str | Callable[[], str]
"""A message, or a function that composes it when it is needed."""


def described(failure: Exception) -> str:
    """``ValueError: text``, or, for an AgentRLError, its text and the traceback of the other process."""
    if isinstance(failure, AgentRLError):
        trace = getattr(failure, "trace", "")
        return f"{failure}\n{trace}" if trace else str(failure)
    return f"{type(failure).__name__}: {failure}" if str(failure) else type(failure).__name__


def with_traceback(failure: Exception) -> str:
    """The same and the traceback, for an error that travels to a process where the exception's class may not exist."""
    return f"{described(failure)}\n{''.join(traceback.format_exception(failure))}"


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


@asynccontextmanager
async def deadline(seconds: float, message: Message, error: type[AgentRLError] = DeadlineError) -> AsyncIterator[None]:
    """Cancel the block after ``seconds``; a TimeoutError that the block itself raises passes unchanged.

    Raises:
        AgentRLError: ``error`` with ``message``, because the time is over.
    """
    try:
        async with asyncio.timeout(seconds) as timer:
            yield
    except TimeoutError:
        if not timer.expired():
            raise
        raise error(_text(message)) from None


@contextmanager
def boundary(
    error: type[AgentRLError],
    message: Message = "",
    *,
    keep: tuple[type[Exception], ...] = (),
    describe: Callable[[Exception], str] = described,
) -> Iterator[None]:
    """Turn what the block raises into ``error``: ``message``, followed by what ``describe`` returns for the exception.

    Errors of the class ``error`` or of ``keep`` pass unchanged. A DeadlineError keeps its text, which is complete.
    """
    try:
        yield
    except error:
        raise
    except Exception as failure:  # noqa: BLE001 - the one place that may: foreign code raises anything
        if isinstance(failure, keep):
            raise
        if isinstance(failure, DeadlineError):
            raise error(str(failure)) from failure
        cause = None if describe is with_traceback else failure
        raise error(f"{_text(message)} {describe(failure)}".lstrip()) from cause


class _HangReporter:
    """One thread that reports every block that hangs; a hook for each trajectory is too often for a thread each."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._blocks: dict[object, tuple[str, int, float]] = {}
        self._wakes = float("inf")
        self._thread: threading.Thread | None = None

    def begin(self, block: object, what: str) -> None:
        now = time.monotonic()
        with self._changed:
            self._blocks[block] = (what, threading.get_ident(), now)
            # After a fork the thread is gone.
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="agentrl-hang-report", daemon=True)
                self._thread.start()
            elif now + HANG_SECONDS < self._wakes:
                self._changed.notify()

    def end(self, block: object) -> None:
        with self._changed:
            del self._blocks[block]

    def _run(self) -> None:
        reported: dict[object, float] = {}
        while True:
            with self._changed:
                reported = {block: reported.get(block, start) for block, (_, _, start) in self._blocks.items()}
                self._wakes = min(reported.values(), default=float("inf")) + HANG_SECONDS
                wait = self._wakes - time.monotonic()
                if wait > 0:
                    self._changed.wait(None if wait == float("inf") else wait)
                    continue
                hanging = [block for block, last in reported.items() if last + HANG_SECONDS <= time.monotonic()]
                found = [(block, *self._blocks[block]) for block in hanging]
            for block, what, thread, start in found:
                reported[block] = time.monotonic()
                stack = "".join(traceback.format_stack(sys._current_frames().get(thread))[-3:])
                seconds = reported[block] - start
                logger.warning("%s has not returned for %.0f s, and the run waits for it:\n%s", what, seconds, stack)


_hang_reporter = _HangReporter()


@contextmanager
def hang_reported(what: str) -> Iterator[None]:
    """Log where the block stands while it hangs. Foreign code in this thread can be reported, but not stopped."""
    block = object()
    _hang_reporter.begin(block, what)
    try:
        yield
    finally:
        _hang_reporter.end(block)


def _text(message: Message) -> str:
    return message if isinstance(message, str) else message()
