"""REINFORCE++: advantages that are normalised over the whole batch, not within a prompt's samples.

Shapes: B rows, R response tokens, M trajectories.
"""

import torch
from torch import Tensor

from agentrl_algorithms.config import ReinforcePlusPlusConfig
from agentrl_algorithms.groups import Trajectories, means, scaled, standardised, whiten
from agentrl_core.api import AdvantageEstimator, AdvantageInput, AdvantageOutput


class ReinforcePlusPlus(AdvantageEstimator):
    r"""REINFORCE++, arXiv 2501.03262, for any number of samples per prompt.

        A_i = (s_i - mean(s)) / (std(s) + 1e-6)            over all trajectories of the batch

    ``s_i`` is the score of trajectory i. A batch with equal scores gets exactly 0.

    Left out: the KL term that the paper adds to the reward of each token, which here is part of the loss. Without it
    a trajectory's tokens have one advantage; therefore trajectories, not tokens, have votes in mean and std (divisor
    M - 1), and long responses do not count more.

    With ``gamma`` below 1 tokens differ, and have the votes:

        G_t = r_t + gamma * G_{t+1}                        t + 1: the next sampled token of the row
        A_t = (G_t - mean(G)) / std(G)                     over all sampled tokens of the batch (divisor N)

    Then a batch with equal scores does have advantages: what is earned soon counts more.

    ``returns`` are the scores, or G.
    """

    config: ReinforcePlusPlusConfig

    def __call__(self, batch: AdvantageInput) -> AdvantageOutput:
        if self.config.gamma < 1:
            returns_BR = discounted(batch, self.config.gamma)
            return AdvantageOutput(whiten(returns_BR, batch.response_mask.bool()), returns_BR)
        trajectories = Trajectories(batch)
        advantages_M = standardised(trajectories.scores_M, torch.zeros_like(trajectories.group_M))
        return AdvantageOutput(trajectories.spread(advantages_M), trajectories.spread(trajectories.scores_M))


class ReinforcePlusPlusBaseline(AdvantageEstimator):
    r"""REINFORCE++ with baseline, arXiv 2501.03262, for several samples per prompt.

        c_i = s_i - mean(s_1 … s_n)                        within the group of trajectory i
        A_i = c_i / (std(c) + 1e-6)                        over all trajectories of the batch

    The mean of c over the batch, which the paper subtracts, is 0: each group's is. Groups of one usable trajectory,
    and groups with equal scores, get exactly 0, and count in std.

    Left out: the separate KL term (k2 estimate) of the paper, which belongs to the loss.

    ``returns`` and metrics are those of ``grpo``.
    """

    def __call__(self, batch: AdvantageInput) -> AdvantageOutput:
        trajectories = Trajectories(batch)
        return trajectories.output(scaled(trajectories.scores_M - means(trajectories.scores_M, trajectories.group_M)))


def discounted(batch: AdvantageInput, gamma: float) -> Tensor:
    """[B, R]: what each sampled token earns from there on in its row; 0 under mask 0, which takes no time."""
    mask_BR = batch.response_mask.bool()
    returns_BR = torch.zeros_like(batch.token_rewards, dtype=torch.float32)
    next_B = returns_BR.new_zeros(len(returns_BR))
    for t in reversed(range(returns_BR.shape[1])):
        return_B = batch.token_rewards[:, t] + gamma * next_B
        returns_BR[:, t] = torch.where(mask_BR[:, t], return_B, 0.0)
        next_B = torch.where(mask_BR[:, t], return_B, next_B)
    return returns_BR
