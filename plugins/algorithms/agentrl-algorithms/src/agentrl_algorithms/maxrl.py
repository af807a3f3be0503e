"""MaxRL: follows the gradient of the log of the success rate, so that hard prompts count more.

Shapes: M trajectories.
"""

import torch

from agentrl_algorithms.groups import Trajectories, means, sums
from agentrl_core.api import AdvantageEstimator, AdvantageInput, AdvantageOutput


class MaxRL(AdvantageEstimator):
    r"""Maximum likelihood RL, arXiv 2602.02710.

        A_i = (s_i - mean(s_1 … s_n)) / mean(s_1 … s_n)        0 where the mean is 0

    ``s_i`` is the score of trajectory i, 0 or 1 in the paper. The gradient of log p is that of p over p, and the mean
    estimates p. The expectation is the gradient of log p's expansion in 1 - p up to the order n - 1; one order is lost
    because the mean is subtracted, and not from groups without success.

    The equation has no meaning with negative scores: groups that have one get 0, and the metric
    ``groups_with_negative_scores`` counts their share. Groups of one usable trajectory, and groups with equal scores,
    get exactly 0.

    ``returns`` and the other metric are those of ``grpo``.
    """

    def __call__(self, batch: AdvantageInput) -> AdvantageOutput:
        trajectories = Trajectories(batch)
        scores_M, group_M = trajectories.scores_M, trajectories.group_M
        mean_M = means(scores_M, group_M)
        negative_G = sums((scores_M < 0).double(), group_M, trajectories.groups) > 0
        defined_M = (mean_M > 0) & ~negative_G[group_M]
        advantages_M = torch.where(defined_M, (scores_M - mean_M) / torch.where(defined_M, mean_M, 1.0), 0.0)
        output = trajectories.output(advantages_M)
        output.metrics["groups_with_negative_scores"] = float(negative_G.sum()) / max(trajectories.groups, 1)
        return output
