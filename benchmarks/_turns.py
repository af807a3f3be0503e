"""Two training runs in two processes that take turns, step by step; the standard library only."""

import json
import os
import time
from multiprocessing.connection import Client

ADDRESS = "AGENTRL_BENCHMARK_SOCKET"


class Turn:
    """The child's side: reports each step, then waits until it may make the next."""

    def __init__(self) -> None:
        self._connection = Client(os.environ[ADDRESS], "AF_UNIX")
        self._start: float | None = None

    def step_ended(self, details: dict[str, float]) -> None:
        """Between two calls lies one step, waiting left out. The first call starts the clock only."""
        seconds = None if self._start is None else time.perf_counter() - self._start
        self._connection.send_bytes(json.dumps({"seconds": seconds, **details}).encode())
        self._connection.recv_bytes()
        self._start = time.perf_counter()


def score(text: str) -> float:
    """The reward of both: the share of distinct characters."""
    return len(set(text)) / max(len(text), 1)


def find_places(near: str, kind: str = "any", radius: int = 500, limit: int = 5) -> str:
    """Finds places on a map.

    Args:
        near: Where to look, as the user said it.
        kind: What to look for.
        radius: Metres.
        limit: Most places in the answer.
    """
    return "There is nothing here."
