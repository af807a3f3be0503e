"""Shares the event loop among trajectories that wake together, and runs the garbage collector less often."""

import asyncio
import gc
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

COLLECTION_THRESHOLD = 50_000
"""Objects that may come before the garbage collector looks at them; Python's own default is 700 or 2,000."""
_open_blocks = 0
"""Blocks of :func:`fewer_collections` that this process is in."""
_thresholds = gc.get_threshold()
"""What the first of them found, and the last one puts back."""


class Pacer:
    """Lets only so many trajectories go on in one iteration of the event loop.

    When an engine answers hundreds of requests at once, or a step starts, each of them computes for a fraction of a
    millisecond: together they would keep timers, deadlines and the answers of others waiting for a long time. First
    come, first served.

    Args:
        per_iteration: how many go on at once.
    """

    def __init__(self, per_iteration: int = 4) -> None:
        self._per_iteration = per_iteration
        self._passed = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Return when it is this coroutine's turn; at once where there is no crowd."""
        loop = asyncio.get_running_loop()
        if self._passed < self._per_iteration:
            if self._passed == 0:
                loop.call_soon(self._admit, loop)
            self._passed += 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _admit(self, loop: asyncio.AbstractEventLoop) -> None:
        self._passed = 0
        while self._waiting and self._passed < self._per_iteration:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._passed += 1
        if self._passed:
            loop.call_soon(self._admit, loop)


@contextmanager
def fewer_collections() -> Iterator[None]:
    """Let Python's garbage collector run less often in the block.

    Almost every object of a rollout lives until its end, and those that imports make stay: each collection walks
    through them and finds nothing.
    """
    global _open_blocks, _thresholds
    # No gc.freeze(): with it, a worker on Ray grew by 80 kB a step in benchmarks/long_run.py, and by 1 kB without.
    if not _open_blocks:
        _thresholds = gc.get_threshold()
        first, *others = _thresholds
        gc.set_threshold(max(first, COLLECTION_THRESHOLD) if first else 0, *others)
    _open_blocks += 1
    try:
        yield
    finally:
        _open_blocks -= 1
        if not _open_blocks:
            gc.set_threshold(*_thresholds)
