"""What the engine did since somebody asked last."""

NAMES = ("prompt_tokens", "cached_tokens", "generated_tokens", "max_running")


class Counters:
    """Sums over finished requests."""

    def __init__(self) -> None:
        self._values = dict.fromkeys(NAMES, 0.0)

    def started(self, running: int) -> None:
        """One more request runs; ``running`` in all."""
        self._values["max_running"] = max(self._values["max_running"], running)

    def finished(self, prompt: int, cached: int, generated: int) -> None:
        """Tokens of a prompt, those of them that were not computed again, and sampled ones."""
        for name, count in zip(NAMES, (prompt, cached, generated), strict=False):
            self._values[name] += count

    def take(self) -> dict[str, float]:
        """All of them, and start again."""
        values, self._values = self._values, dict.fromkeys(NAMES, 0.0)
        return values
