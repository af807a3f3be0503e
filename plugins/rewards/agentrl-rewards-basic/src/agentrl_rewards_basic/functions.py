"""Reward functions for answers that are a number or a short text.

Both read only what the policy wrote in its last turn: a number in a tool's or a user's message earns nothing.
"""

from typing import ClassVar

from agentrl_core.api import NoConfig, RewardFunctionContext, RewardResult, RewardTrajectory
from agentrl_rewards_basic.config import HashAnswerConfig
from agentrl_rewards_basic.numbers import last_number, normal_form, parse_number
from agentrl_rewards_basic.rows import ground_truth, row_of

MARKER = "####"


class HashAnswer:
    """1.0 if the answer after the last ``####`` of the last turn, up to the line's end, is the ground truth.

    Numbers are compared as numbers, anything else as text without surrounding space. A wrong answer scores
    ``format_score``, a turn without the marker 0.0.

    Raises:
        ValueError: the row has no ground truth.
    """

    isolation: ClassVar[str] = "inline"

    def __init__(self, config: HashAnswerConfig, context: RewardFunctionContext) -> None:
        self.format_score = config.format_score
        self.name = context.name

    def __call__(self, trajectory: RewardTrajectory) -> RewardResult:
        truth = ground_truth(trajectory, self.name)
        _, marker, tail = trajectory.last_text.rpartition(MARKER)
        answer = tail.split("\n", 1)[0].strip()
        if not marker or not answer:
            return RewardResult(0.0, answer="")
        number, true_number = parse_number(answer), parse_number(truth)
        right = answer == truth if number is None or true_number is None else number == true_number
        return RewardResult(1.0 if right else self.format_score, answer=normal_form(answer))


class ExactNumber:
    """1.0 if the last number of the last turn is the ground truth, else 0.0.

    Raises:
        ValueError: the row has no ground truth, or one that is not a number.
    """

    isolation: ClassVar[str] = "inline"

    def __init__(self, config: NoConfig, context: RewardFunctionContext) -> None:
        self.name = context.name

    def __call__(self, trajectory: RewardTrajectory) -> RewardResult:
        truth = ground_truth(trajectory, self.name)
        true_number = parse_number(truth)
        if true_number is None:
            raise ValueError(
                f"{self.name}: the ground truth of {row_of(trajectory)} is {truth!r}, which is not a number"
            )
        number = last_number(trajectory.last_text)
        return RewardResult(float(number == true_number), answer="" if number is None else normal_form(str(number)))
