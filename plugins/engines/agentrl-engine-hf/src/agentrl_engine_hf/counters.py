"""What the engine counts."""

import threading


class Counters:
    """Sums since the last :meth:`take`; written by the engine's thread, taken by any other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._sums: dict[str, float] = {
            "prompt_tokens": 0.0,
            "cached_tokens": 0.0,
            "generated_tokens": 0.0,
            "steps": 0.0,
            "busy_seconds": 0.0,
        }
        self._max_running = 0

    def add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._sums[name] += amount

    def observe_running(self, running: int) -> None:
        with self._lock:
            self._max_running = max(self._max_running, running)

    def take(self) -> dict[str, float]:
        with self._lock:
            taken = {**self._sums, "max_running": float(self._max_running)}
            self._reset()
            return taken
