"""The trackers of a run. None of them can stop it."""

import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any

from agentrl_core.api import EndedTrajectory, Tracker

logger = logging.getLogger(__name__)
DEADLINE_SECONDS = 120.0
"""A tracker whose call takes longer is disabled. Libraries that wait for a server give up sooner."""


class _TrackerThread:
    """A tracker in a thread of its own: one thread, as database connections want it, and one that may be left behind.

    Args:
        name: for messages.
        build: makes the tracker, in the thread.
    """

    def __init__(self, name: str, build: Callable[[], Tracker]) -> None:
        self.name = name
        self.tracker: Tracker
        self._build = build
        self._hangs = False
        self._calls: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"agentrl-tracker-{name}", daemon=True)
        self._thread.start()

    def build(self) -> None:
        self.tracker = self._build()

    def call(self, function: Callable[[], None]) -> Exception | None:
        """Call a function in the tracker's thread; return what it raised, or why nothing came back."""
        outcome: Future[None] = Future()
        self._calls.put((function, outcome))
        if wait([outcome], DEADLINE_SECONDS).done:
            error = outcome.exception()
            return error if error is None or isinstance(error, Exception) else RuntimeError(repr(error))
        self._hangs = True
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = "".join(traceback.format_stack(frame)[-3:])
        return TimeoutError(f"it has not returned within {DEADLINE_SECONDS:g} s; its thread is left behind at\n{stack}")

    def end(self) -> None:
        """End the thread; one that hangs ends with the process."""
        self._calls.put(None)
        self._thread.join(0.0 if self._hangs else None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            function, outcome = call
            try:
                function()
            except BaseException as error:  # noqa: BLE001 - sys.exit in foreign code is a failure like any other
                outcome.set_exception(error)
            else:
                outcome.set_result(None)


class Trackers:
    """Calls the trackers of a run. One that raises or hangs is reported once and disabled; the run continues.

    Args:
        factories: name and factory of each.
    """

    def __init__(self, factories: Iterable[tuple[str, Callable[[], Tracker]]] = ()) -> None:
        self._threads = [_TrackerThread(name, build) for name, build in factories]
        self._each("when it was built", lambda thread: thread.build())

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of one step."""
        self._each(f"at step {step}", lambda thread: thread.tracker.log(metrics, step))

    @property
    def want_trajectories(self) -> bool:
        """Whether a tracker does something with trajectories."""
        return any(type(thread.tracker).log_trajectories is not Tracker.log_trajectories for thread in self._threads)

    def log_trajectories(self, trajectories: Sequence[EndedTrajectory], step: int) -> None:
        """Log the trajectories of one rollout."""
        self._each(
            f"with the trajectories of step {step}",
            lambda thread: thread.tracker.log_trajectories(trajectories, step),
        )

    def progress(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Report what happens within a step to those that want to know."""
        self._each(
            f"in the phase {phase!r}",
            lambda thread: thread.tracker.progress(phase, done, total),
            [thread for thread in self._threads if type(thread.tracker).progress is not Tracker.progress],
        )

    def finish(self, status: str) -> None:
        """Report that the run has ended."""
        self._each("at the end of the run", lambda thread: thread.tracker.finish(status))
        for thread in self._threads:
            thread.end()
        self._threads = []

    def _each(
        self, when: str, call: Callable[[_TrackerThread], Any], threads: Iterable[_TrackerThread] | None = None
    ) -> None:
        for thread in list(self._threads if threads is None else threads):
            error = thread.call(lambda thread=thread: call(thread))  # type: ignore[misc]
            if error is not None:
                self._threads = [each for each in self._threads if each is not thread]
                thread.end()
                logger.error(
                    "tracker %r failed %s and is disabled; the run continues: %s: %s",
                    thread.name, when, type(error).__name__, error, exc_info=error if error.__traceback__ else None,
                )  # fmt: skip
