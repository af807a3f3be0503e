"""Leave-one-out: each sample is compared with the mean of the other samples of its prompt.

Shapes: M trajectories.
"""

from agentrl_algorithms.groups import Trajectories, means
from agentrl_core.api import AdvantageEstimator, AdvantageInput, AdvantageOutput


class RLOO(AdvantageEstimator):
    r"""RLOO, "Back to Basics", arXiv 2402.14740.

        A_i = s_i - (sum of s_j over j ≠ i) / (n - 1)  =  n / (n - 1) * (s_i - mean(s_1 … s_n))

    ``s_i`` is the score of trajectory i of a group of n. The baseline does not depend on the sample itself, so the
    gradient is unbiased. Groups of one usable trajectory, and groups with equal scores, get exactly 0.

    Left out: the KL term that the paper subtracts from the reward, which here is part of the loss.

    ``returns`` and metrics are those of ``grpo``.
    """

    def __call__(self, batch: AdvantageInput) -> AdvantageOutput:
        trajectories = Trajectories(batch)
        others_M = (trajectories.votes_M - 1).clamp(min=1)
        centred_M = trajectories.scores_M - means(trajectories.scores_M, trajectories.group_M)
        return trajectories.output(centred_M * trajectories.votes_M / others_M)
