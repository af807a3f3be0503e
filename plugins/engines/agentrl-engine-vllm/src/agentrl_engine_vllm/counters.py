"""What the engine did since somebody asked last, and what vLLM computes."""

from typing import Any

NAMES = ("prompt_tokens", "cached_tokens")


class Counters:
    """Sums over finished requests."""

    def __init__(self) -> None:
        self._values = dict.fromkeys(NAMES, 0.0)

    def finished(self, prompt: int, cached: int) -> None:
        """Tokens of a prompt, and those of them that were not computed again."""
        for name, count in zip(NAMES, (prompt, cached), strict=True):
            self._values[name] += count

    def take(self) -> dict[str, float]:
        """All of them, and start again."""
        values, self._values = self._values, dict.fromkeys(NAMES, 0.0)
        return values


class StepCounter:
    """A logger of vLLM's statistics, and the factory of itself: the steps of all cores whose results have come."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, vllm_config: Any, engine_index: int = 0) -> "StepCounter":
        return self

    def record(self, *stats: Any, **more_stats: Any) -> None:
        """Called for each step."""
        self.steps += 1

    def log(self) -> None:
        """Nothing is written."""

    def log_engine_initialized(self) -> None:
        """Nothing is written."""

    def record_sleep_state(self, *state: Any, **more_state: Any) -> None:
        """Does not count."""
