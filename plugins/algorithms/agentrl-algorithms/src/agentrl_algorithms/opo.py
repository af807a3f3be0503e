"""OPO: the group baseline that minimises the variance of the gradient if longer responses have larger gradients.

Shapes: M trajectories.
"""

from agentrl_algorithms.groups import Trajectories, means
from agentrl_core.api import AdvantageEstimator, AdvantageInput, AdvantageOutput


class OPO(AdvantageEstimator):
    r"""On-policy RL with optimal reward baseline, arXiv 2505.23585.

        A_i = s_i - (sum of l_j s_j) / (sum of l_j)        over the group of trajectory i

    ``s_i`` is the score and ``l_i`` the number of sampled tokens of trajectory i, in all its rows. The optimal baseline
    weights scores with squared gradient norms; the paper takes these as proportional to the length. Groups of one
    usable trajectory, and groups with equal scores, get exactly 0.

    Left out: exact on-policy training, the paper's other half, which is a matter of the config: one epoch and one mini
    batch per step, the defaults.

    ``returns`` and metrics are those of ``grpo``.
    """

    def __call__(self, batch: AdvantageInput) -> AdvantageOutput:
        trajectories = Trajectories(batch)
        baseline_M = means(trajectories.scores_M, trajectories.group_M, trajectories.lengths())
        return trajectories.output(trajectories.scores_M - baseline_M)
