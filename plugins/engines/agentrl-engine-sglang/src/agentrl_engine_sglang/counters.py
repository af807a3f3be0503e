"""What the engine did since somebody asked last."""

from typing import Any

NAMES = ("prompt_tokens", "cached_tokens", "retractions")


class Counters:
    """Sums over finished requests, from the server's own account of each."""

    def __init__(self) -> None:
        self._values = dict.fromkeys(NAMES, 0.0)

    def finished(self, meta: dict[str, Any]) -> None:
        """``meta`` is the ``meta_info`` of a reply."""
        fields = ("prompt_tokens", "cached_tokens", "num_retractions")
        for name, field in zip(NAMES, fields, strict=True):
            self._values[name] += float(meta.get(field) or 0)

    def take(self) -> dict[str, float]:
        """All of them, and start again."""
        values, self._values = self._values, dict.fromkeys(NAMES, 0.0)
        return values
