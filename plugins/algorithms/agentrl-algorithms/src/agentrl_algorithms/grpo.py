"""Group relative advantages: each sample is compared with the other samples of its prompt.

Shapes: M trajectories.
"""

from agentrl_algorithms.config import GRPOConfig
from agentrl_algorithms.groups import Trajectories, means, standardised
from agentrl_core.api import AdvantageEstimator, AdvantageInput, AdvantageOutput


class GRPO(AdvantageEstimator):
    r"""Outcome-supervised GRPO, "DeepSeekMath", arXiv 2402.03300, section 4.1.2.

        A_i = (s_i - mean(s_1 … s_n)) / (std(s_1 … s_n) + eps)        the same for every sampled token of sample i

    ``s_i`` is the score of trajectory i and the sums run over the trajectories of its group. ``norm_by_std=False``
    leaves the division out, as "Understanding R1-Zero-Like Training" (Dr. GRPO, arXiv 2503.20783, section 3.2)
    recommends: dividing gives prompts that are nearly always or nearly never solved a larger weight.

    The standard deviation is that of a sample (divisor n - 1). A group whose scores are all equal gets exactly 0, not
    a rounding error divided by eps. So does a group with one usable trajectory: it has nothing to be compared with.

    Rows without a sampled token (excluded samples among them) have no vote. A trajectory of several rows has one vote,
    and all its rows get its advantage.

    Left out: process supervision (section 4.1.3), for which there is ``turn_rloo``; the KL term, which is part of the
    loss and not of the advantage.

    ``returns`` are the trajectory's score on every sampled token.
    """

    config: GRPOConfig

    def __call__(self, batch: AdvantageInput) -> AdvantageOutput:
        trajectories = Trajectories(batch)
        scores_M, group_M = trajectories.scores_M, trajectories.group_M
        if self.config.norm_by_std:
            return trajectories.output(standardised(scores_M, group_M, self.config.eps))
        return trajectories.output(scores_M - means(scores_M, group_M))
