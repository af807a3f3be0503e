"""The reward function."""

import re

from acme_agentrl_extras.config import ClosenessConfig
from agentrl_core.api import RewardFunctionContext, RewardResult, RewardTrajectory

NUMBER = re.compile(r"-?[0-9]{1,15}(?:\.[0-9]{1,15})?")


class Closeness:
    """score = 1 / (1 + error / tolerance), error = |answer - truth| / max(|truth|, 1); 0 without a number.

    Raises:
        ValueError: the ground truth is no number; the trajectory is then not trained.
    """

    def __init__(self, config: ClosenessConfig, context: RewardFunctionContext) -> None:
        self.tolerance = config.tolerance

    def __call__(self, trajectory: RewardTrajectory) -> RewardResult:
        truth = float(trajectory.ground_truth)
        numbers = NUMBER.findall(trajectory.last_text)
        if not numbers:
            return RewardResult(0.0, {"has_number": 0.0})
        error = abs(float(numbers[-1]) - truth) / max(abs(truth), 1.0)
        return RewardResult(1 / (1 + error / self.tolerance), {"has_number": 1.0})
