"""What the engine did since somebody asked last."""

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
