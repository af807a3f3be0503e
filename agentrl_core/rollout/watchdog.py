"""Says which trajectory waits where and for how long, also when user code has blocked the event loop itself."""

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from functools import partial

from agentrl_core.rollout.session import RolloutSession

logger = logging.getLogger(__name__)


class Watchdog:
    """Watches the live sessions of a worker while one of its ``with`` blocks runs; they may overlap.

    Args:
        sessions: the live sessions by request id; the mapping changes under way.
        interval: seconds between reports, and the age from which a session is reported.
        most: sessions named in one report.
    """

    def __init__(self, sessions: Mapping[str, RolloutSession], interval: float, most: int = 5) -> None:
        self._sessions = sessions
        self._interval = interval
        self._most = most
        self._blocks = 0

    def __enter__(self) -> None:
        self._blocks += 1
        if self._blocks > 1:
            return
        self._beat = time.monotonic()
        self._stop = threading.Event()
        self._loop_thread = threading.get_ident()
        self._task = asyncio.create_task(self._watch())
        watch = partial(self._watch_loop, self._stop)
        threading.Thread(target=watch, name="agentrl-watchdog", daemon=True).start()

    def __exit__(self, *error: object) -> None:
        self._blocks -= 1
        if not self._blocks:
            self._stop.set()
            self._task.cancel()

    async def _watch(self) -> None:
        last_report = time.monotonic()
        while True:
            self._beat = time.monotonic()
            if self._beat - last_report >= self._interval:
                last_report = self._beat
                self._report()
            await asyncio.sleep(min(1.0, self._interval / 4))

    def _report(self) -> None:
        now = time.monotonic()
        waits = [(now - session.state_since, session) for session in list(self._sessions.values())]
        slow = sorted((wait for wait in waits if wait[0] >= self._interval), key=lambda wait: -wait[0])
        if slow:
            lines = [
                f"  {session.trajectory_id}: {session.state} for {age:.0f} s" for age, session in slow[: self._most]
            ]
            logger.warning(
                "%d of %d live trajectories wait for more than %.0f s, the longest:\n%s",
                len(slow), len(waits), self._interval, "\n".join(lines),
            )  # fmt: skip

    def _watch_loop(self, stop: threading.Event) -> None:
        while not stop.wait(self._interval):
            blocked = time.monotonic() - self._beat
            frame = sys._current_frames().get(self._loop_thread)
            if blocked >= self._interval and frame is not None:
                logger.warning(
                    "the event loop has been blocked for %.0f s, so no trajectory moves; it is in:\n%s"
                    "set isolation: process for the tool or reward that computes there",
                    blocked, "".join(traceback.format_stack(frame)[-6:]),
                )  # fmt: skip
