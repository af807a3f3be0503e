"""Pass@k: rewards a group for its best sample, and so exploration.

Shapes: M trajectories, G groups.
"""

import torch

from agentrl_algorithms.groups import Trajectories
from agentrl_core.api import AdvantageEstimator, AdvantageInput, AdvantageOutput


class GRPOPassK(AdvantageEstimator):
    r"""Leave-one-out for pass@k, arXiv 2503.19595.

        A_i = max(s_1 … s_n) - max over j ≠ i of s_j

    ``s_i`` is the score of trajectory i of a group of n, and k = n = ``rollout.n``. The objective is the group's best
    score: pass@k for scores of 0 and 1. Leaving out sample i changes it only if i alone is the best, so this one gets
    its lead over the second best and all others get 0; the gradient is unbiased. Groups of one usable trajectory, and
    groups with equal scores, get exactly 0.

    Left out: division by the group's standard deviation, which some implementations add and the paper does not have;
    k < n, which needs a mean over subsets (arXiv 2505.15201).

    ``returns`` and metrics are those of ``grpo``.
    """

    def __call__(self, batch: AdvantageInput) -> AdvantageOutput:
        trajectories = Trajectories(batch)
        scores_M, group_M = trajectories.scores_M, trajectories.group_M
        best_G = scores_M.new_full((trajectories.groups,), -torch.inf).scatter_reduce_(0, group_M, scores_M, "amax")
        is_best_M = scores_M == best_G[group_M]
        below_M = torch.where(is_best_M, -torch.inf, scores_M)
        second_G = torch.full_like(best_G, -torch.inf).scatter_reduce_(0, group_M, below_M, "amax")
        best_count_G = torch.bincount(group_M[is_best_M], minlength=trajectories.groups)
        alone_M = is_best_M & (best_count_G[group_M] == 1) & (trajectories.votes_M > 1)
        return trajectories.output(torch.where(alone_M, scores_M - second_G[group_M], 0.0))
