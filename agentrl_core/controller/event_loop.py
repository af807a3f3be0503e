"""Running coroutines from synchronous code."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class EventLoop:
    """One persistent event loop, run in the thread that calls `run`.

    Where that is impossible, because a loop runs in this thread already (a notebook) or this one is busy, coroutines
    run on a second loop in its own thread. So do all of them with ``in_background``: tasks that they leave behind go on
    between two calls of `run`.
    """

    def __init__(self) -> None:
        self.in_background = False
        self._runner = asyncio.Runner()
        self._helper: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs the coroutine to its end and returns what it returns."""
        elsewhere = self.in_background or _is_loop_running_here() or self._runner.get_loop().is_running()
        run = self._run_on_helper if elsewhere else self._runner.run
        try:
            return run(coroutine)
        except asyncio.CancelledError:
            # Only `interrupt` cancels the outermost task.
            raise KeyboardInterrupt from None
        except KeyboardInterrupt:
            # It left the coroutine where it stood; what that holds is released while all that it uses still lives.
            run(_cancel_all())
            raise

    def _run_on_helper(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._helper_loop()).result()

    def close(self) -> None:
        """Cancels what is left on the loops and closes them."""
        if self._helper is not None and self._thread is not None:
            asyncio.run_coroutine_threadsafe(_cancel_all(), self._helper).result()
            self._helper.call_soon_threadsafe(self._helper.stop)
            self._thread.join()
            self._helper.close()
            self._helper = self._thread = None
        if not _is_loop_running_here():
            self._runner.close()

    def _helper_loop(self) -> asyncio.AbstractEventLoop:
        if self._helper is None:
            self._helper = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._helper.run_forever, name="agentrl-event-loop", daemon=True)
            self._thread.start()
        return self._helper


def run_alone(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs the coroutine on an event loop of its own, whether or not one runs in this thread."""
    loop = EventLoop()
    try:
        return loop.run(coroutine)
    finally:
        loop.close()


def interrupt() -> None:
    """Stop what this thread does, for a signal handler: cancel all tasks of its event loop, or raise KeyboardInterrupt.

    KeyboardInterrupt would reach only the task that runs now, and the next one could block the event loop again.
    """
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        raise KeyboardInterrupt from None
    current = asyncio.current_task()
    for task in asyncio.all_tasks() - {current}:
        task.cancel()
    loop.call_soon_threadsafe(lambda: None)  # wakes a loop that waits for input
    if current is not None:
        raise asyncio.CancelledError


def _is_loop_running_here() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
