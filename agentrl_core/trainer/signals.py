"""SIGINT, SIGTERM and SIGHUP finish the step; a second one stops immediately, a third one kills the process."""

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from agentrl_core.controller.event_loop import interrupt

logger = logging.getLogger(__name__)


class StopRequest:
    """Records that a signal, or a hook, asks the run to stop after this step."""

    def __init__(self) -> None:
        self.requested = False
        self.number: int | None = None
        """Number of that signal."""
        self._interrupted = False
        self.may_finish_step = False
        """False while there is no step to finish: then a signal stops the run immediately."""
        self._notice: threading.Thread | None = None

    def request(self, reason: str) -> None:
        """Ask for the same without a signal."""
        if not self.requested:
            self.requested = True
            logger.warning("the run stops after this step and saves a checkpoint: %s", reason)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals during the block. Python allows that in the main thread only; elsewhere this does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous: dict[int, Any] = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup ignores SIGHUP, and that must stay so.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, self._handle)
        try:
            yield
        finally:
            for taken, handler in previous.items():
                signal.signal(taken, handler)
            if self._notice is not None:
                self._notice.join()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted:
            # KeyboardInterrupt did not stop the run: foreign code blocks the event loop that has to close it.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if self.requested or not self.may_finish_step:
            self._interrupted = True
            interrupt()
            return
        self.requested = True
        self.number = number
        message = "%s: the run stops after this step and saves a checkpoint; repeat to stop immediately"
        # In a thread: the signal may have interrupted a write, and streams reject another one then.
        self._notice = threading.Thread(target=logger.warning, args=(message, signal.Signals(number).name))
        self._notice.start()
