"""GPG: the plain policy gradient with a group baseline, corrected for prompts that teach nothing.

Shapes: M trajectories.
"""

from agentrl_algorithms.groups import Trajectories, means, sums
from agentrl_core.api import AdvantageEstimator, AdvantageInput, AdvantageOutput


class GPG(AdvantageEstimator):
    r"""Group policy gradient, arXiv 2504.02546.

        A_i   = alpha * (s_i - mean(s_1 … s_n)) / F_norm,      F_norm = 1
        alpha = M / (M - M_0)

    ``s_i`` is the score of trajectory i, M the number of trajectories in the batch and M_0 of those whose group has
    equal scores. These have no gradient but count where the loss is averaged; alpha makes up for them. They get
    exactly 0, and so do groups of one usable trajectory.

    Left out: F_norm = std, which is ``grpo``; sampling more prompts where too few have a signal. The paper has no ratio
    and no clipping, which is a matter of the loss.

    ``returns`` and metrics are those of ``grpo``, and ``alpha``.
    """

    def __call__(self, batch: AdvantageInput) -> AdvantageOutput:
        trajectories = Trajectories(batch)
        group_M = trajectories.group_M
        centred_M = trajectories.scores_M - means(trajectories.scores_M, group_M)
        signals_G = sums((centred_M != 0).double(), group_M, trajectories.groups)
        with_signal = int((signals_G[group_M] > 0).sum())
        alpha = len(group_M) / with_signal if with_signal else 1.0
        output = trajectories.output(alpha * centred_M)
        output.metrics["alpha"] = alpha
        return output
