"""A model of ``engines`` as a reward function: it reads a prompt about the trajectory, and its verdict is the score."""

import math
import re
from typing import ClassVar

from agentrl_core.api import ConfigError, RewardError, RewardFunctionContext, RewardResult, RewardTrajectory
from agentrl_core.api.message_parts import text_of
from agentrl_rewards_judge.config import JudgeConfig

# 8/10 is an 8: the denominator belongs to the match.
PATTERNS = {"number": r"(-?\d+(?:\.\d+)?)(?:\s*/\s*\d+(?:\.\d+)?)?", "yes_no": r"\b(yes|no)\b"}
FIELDS = ("question", "answer", "ground_truth", "conversation")
_FIELD = re.compile(r"\{(\w+)\}")


class Judge:
    """Scores what the judge says: its number, 1 for yes and 0 for no, with ``scale`` mapped to 0..1.

    Raises:
        RewardError: no answer had a verdict; shows the last one.
    """

    isolation: ClassVar[str] = "inline"

    def __init__(self, config: JudgeConfig, context: RewardFunctionContext) -> None:
        unknown = sorted(set(_FIELD.findall(config.template)) - set(FIELDS))
        if unknown or not _FIELD.search(config.template):
            found = ", ".join(f"{{{name}}}" for name in unknown) or "none"
            raise ConfigError(f"template: found the fields {found}; allowed are {{{'}, {'.join(FIELDS)}}}")
        if config.scale is not None and (len(config.scale) != 2 or config.scale[0] >= config.scale[1]):
            raise ConfigError(f"scale: expected [lowest, highest], found {config.scale}")
        try:
            self._verdict = re.compile(PATTERNS.get(config.score, config.score), re.IGNORECASE)
        except re.error as error:
            raise ConfigError(f"score: {config.score!r} is not a regular expression: {error}") from None
        if not self._verdict.groups:
            raise ConfigError(f"score: expected number, yes_no or an expression with a (group), found {config.score!r}")
        self._config = config
        self._engine = context.engines[config.engine]

    async def __call__(self, trajectory: RewardTrajectory) -> RewardResult:
        config, prompt = self._config, self._prompt(trajectory)
        for retry in range(config.retries + 1):
            # A greedy judge would repeat itself.
            temperature = max(config.temperature, 1.0) if retry else config.temperature
            messages = [{"role": "user", "content": prompt}]
            text = await self._engine.chat(messages, temperature=temperature, max_tokens=config.max_tokens)
            score = self._read(text)
            if score is not None:
                return RewardResult(score, metrics={"retries": float(retry)})
        raise RewardError(
            f"the judge {config.engine!r} gave no verdict (score: {config.score}, scale: {config.scale}) in "
            f"{config.retries + 1} answers. The last one: {text[-500:]!r}"
        )

    def _read(self, text: str) -> float | None:
        *_, last = [None, *self._verdict.finditer(text)]
        found = ((last and last[1]) or "").strip().lower()
        try:
            number = {"yes": 1.0, "no": 0.0}[found] if found in ("yes", "no") else float(found)
        except ValueError:
            return None
        low, high = self._config.scale or (-math.inf, math.inf)
        if not (math.isfinite(number) and low <= number <= high):
            return None
        return (number - low) / (high - low) if self._config.scale else number

    def _prompt(self, trajectory: RewardTrajectory) -> str:
        messages = trajectory.messages
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"] or [len(messages)]
        asked = [text_of(message) for message in messages[: turns[0]] if message["role"] == "user"]
        values = {
            "question": asked[-1] if asked else "",
            "answer": trajectory.last_text,
            "ground_truth": "" if trajectory.ground_truth is None else str(trajectory.ground_truth),
            "conversation": "\n\n".join(f"{message['role']}: {text_of(message)}" for message in messages),
        }
        return _FIELD.sub(lambda found: values[found[1]], self._config.template)
