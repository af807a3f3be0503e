"""The trackers of a run, kept away from its course."""

import logging
from collections.abc import Callable, Iterable, Mapping

from agentrl_core.api import Tracker
from agentrl_core.plugins.boundary import hang_reported

logger = logging.getLogger(__name__)


class Trackers:
    """Calls the trackers of a run. One that raises is reported once and gets nothing more; the run continues."""

    def __init__(self, trackers: Iterable[tuple[str, Tracker]] = ()) -> None:
        self._trackers = list(trackers)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Metrics of one step."""
        self._each(f"at step {step}", lambda tracker: tracker.log(metrics, step))

    def finish(self, status: str) -> None:
        """The run has ended."""
        self._each("at the end of the run", lambda tracker: tracker.finish(status))

    def _each(self, when: str, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers):
            try:
                with hang_reported(f"tracker {name!r}, called {when},"):
                    call(tracker)
            except Exception as error:  # noqa: BLE001 - a tracker is foreign code, and no reason to lose a step
                self._trackers.remove((name, tracker))
                logger.error(
                    "tracker %r failed %s and gets nothing more; the run continues: %s: %s",
                    name, when, type(error).__name__, error, exc_info=True,
                )  # fmt: skip
