"""What the engine did since somebody asked last."""

from typing import Any

NAMES = ("prompt_tokens", "cached_tokens", "generated_tokens", "retractions", "max_running")


class Counters:
    """Sums over finished requests, from the server's own account of each."""

    def __init__(self) -> None:
        self._values = dict.fromkeys(NAMES, 0.0)

    def started(self, running: int) -> None:
        """One more request runs; ``running`` in all."""
        self._values["max_running"] = max(self._values["max_running"], running)

    def finished(self, meta: dict[str, Any]) -> None:
        """``meta`` is the ``meta_info`` of a reply."""
        fields = ("prompt_tokens", "cached_tokens", "completion_tokens", "num_retractions")
        for name, field in zip(NAMES, fields, strict=False):
            self._values[name] += float(meta.get(field) or 0)

    def take(self) -> dict[str, float]:
        """All of them, and start again."""
        values, self._values = self._values, dict.fromkeys(NAMES, 0.0)
        return values
