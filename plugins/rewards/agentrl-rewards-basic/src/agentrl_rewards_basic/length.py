"""Penalties for answers that are too long or repeat themselves."""

from typing import ClassVar

from agentrl_core.api import RewardFunctionContext, RewardTrajectory
from agentrl_rewards_basic.config import LengthPenaltyConfig, OverlongConfig, RepetitionPenaltyConfig
from agentrl_rewards_basic.rows import row_of


class LengthPenalty:
    """DAPO's soft overlong punishment, arXiv 2503.14476, equation 13, from -1 to 0.

        R(y) = 0                                       |y| <= L_max - L_cache
               ((L_max - L_cache) - |y|) / L_cache     L_max - L_cache < |y| <= L_max
               -1                                      L_max < |y|

    ``L_max`` is ``max_length``, ``L_cache`` is ``cache_length``, and ``|y|`` counts what the policy sampled in all
    turns.

    Raises:
        ValueError: the trajectory has a text and no tokens, as those of a run that did not record their number.
    """

    isolation: ClassVar[str] = "inline"

    def __init__(self, config: LengthPenaltyConfig, context: RewardFunctionContext) -> None:
        self.config = config
        self.name = context.name
        check_lengths(config, context.name)

    def __call__(self, trajectory: RewardTrajectory) -> float:
        if self.config.unit == "characters":
            return soft_overlong(len(trajectory.model_text), self.config)
        return soft_overlong(sampled_tokens(trajectory, self.name), self.config)


class RepetitionPenalty:
    """Minus the share of n-grams that the policy had written before: 0 without repetition, towards -1 for a loop.

        -(1 - |distinct n-grams| / |n-grams|)

    After the n-gram penalty of "Demystifying Long Chain-of-Thought Reasoning in LLMs", arXiv 2502.03373. Left out: the
    paper penalises the repeating tokens; this scores the text of all turns.
    """

    isolation: ClassVar[str] = "inline"

    def __init__(self, config: RepetitionPenaltyConfig, context: RewardFunctionContext) -> None:
        self.config = config

    def __call__(self, trajectory: RewardTrajectory) -> float:
        text, n = trajectory.model_text, self.config.n
        items = text.split() if self.config.unit == "words" else list(text)
        count = len(items) - n + 1
        if count < 1:
            return 0.0
        return len(set(zip(*(items[start:] for start in range(n)), strict=False))) / count - 1.0


def soft_overlong(length: int, config: OverlongConfig) -> float:
    """Equation 13 for one length."""
    excess = length - (config.max_length - config.cache_length)
    if excess <= 0:
        return 0.0
    return -1.0 if length > config.max_length else -excess / config.cache_length


def sampled_tokens(trajectory: RewardTrajectory, name: str) -> int:
    """The number of tokens that the policy sampled; ``name`` is who asks."""
    if trajectory.model_text and not trajectory.sampled_tokens:
        raise ValueError(
            f"{name}: the trajectory of {row_of(trajectory)} has a text but no number of tokens; records of older "
            "runs have none; use the reward function length_penalty with `unit: characters`"
        )
    return trajectory.sampled_tokens


def check_lengths(config: OverlongConfig, name: str) -> None:
    """Raises ValueError where the cache is longer than the whole."""
    if config.cache_length > config.max_length:
        raise ValueError(
            f"{name}: cache_length is {config.cache_length}, allowed are at most max_length = {config.max_length}"
        )
