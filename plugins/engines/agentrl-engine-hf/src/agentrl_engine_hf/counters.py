"""What the engine counts."""

import threading


class Counters:
    """Sums since the last :meth:`take`; written by the engine's thread, taken by any other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.steps = 0.0
        """Of the whole time."""
        self._reset()

    def _reset(self) -> None:
        self._sums: dict[str, float] = {
            "prompt_tokens": 0.0,
            "cached_tokens": 0.0,
            "steps": 0.0,
            "busy_seconds": 0.0,
        }

    def add(self, **amounts: float) -> None:
        with self._lock:
            self.steps += amounts.get("steps", 0.0)
            for name, amount in amounts.items():
                self._sums[name] += amount

    def take(self) -> dict[str, float]:
        with self._lock:
            taken = self._sums
            self._reset()
            return taken
