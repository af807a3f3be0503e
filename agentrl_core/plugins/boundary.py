"""The boundary to code that is not ours: how long it may take, and which of our errors its failures become."""

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from agentrl_core.api.errors import AgentRLError, DeadlineError

logger = logging.getLogger(__name__)
HANG_SECONDS = 60.0
"""A call that takes longer is reported, and again each time that this time has passed."""
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


@contextmanager
def hang_reported(what: str) -> Iterator[None]:
    """Log where the block stands while it hangs. Foreign code in this thread can be reported, but not stopped."""
    thread, done = threading.get_ident(), threading.Event()

    def report() -> None:
        seconds = 0.0
        while not done.wait(HANG_SECONDS):
            seconds += HANG_SECONDS
            stack = "".join(traceback.format_stack(sys._current_frames().get(thread))[-3:])
            logger.warning("%s has not returned for %.0f s, and the run waits for it:\n%s", what, seconds, stack)

    reporter = threading.Thread(target=report, name="agentrl-hang-report", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        done.set()
        reporter.join()


def _text(message: Message) -> str:
    return message if isinstance(message, str) else message()
