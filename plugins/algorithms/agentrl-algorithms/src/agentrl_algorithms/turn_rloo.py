"""Credit for each turn: what a trajectory earns from a turn on is compared with the other samples of its prompt.

Shapes: B rows, R response tokens, T turns, M trajectories.
"""

import torch

from agentrl_algorithms.config import TurnRLOOConfig
from agentrl_algorithms.groups import Trajectories, means
from agentrl_core.api import AdvantageEstimator, AdvantageInput, AdvantageOutput


class TurnRLOO(AdvantageEstimator):
    r"""Leave-one-out over the returns of turns; RLOO (arXiv 2402.14740) applied to each turn of a multi-turn task.

        G_ik = r_ik + turn_gamma * G_i,k+1                          what trajectory i earns from turn k on
        A_ik = G_ik - (sum of G_jm over j ≠ i) / (n - 1),   m = min(k, last turn of j)

    ``s_i`` is the score of trajectory i of a group of n and ``r_ij`` the reward of its turn j. Every sampled token of
    turn k gets A_ik. The rest of s_i, which is of no turn, comes with the last turn. With ``turn_gamma=1`` G_ik is s_i
    minus what was earned before turn k, and with outcome rewards only this is ``rloo``. With ``turn_gamma=0`` each turn
    is credited with its own reward.

    The baseline of turn k is a function of the other trajectories alone, so the gradient is unbiased. One that ended
    before turn k stands in with the return of its last turn, so that each turn is compared with all of them.

    Comparing the reward of turn k with those of the samples that have a turn k, as MT-GRPO (arXiv 2505.11821) does, and
    adding up these differences over a trajectory's remaining turns would be biased: how many baselines are subtracted
    depends on where the trajectory stops, which the policy decides. The gradient then has the extra term
    -E[mean reward of turn k + 1] * grad P(turn k + 1 is taken), a penalty on further turns where turns are rewarded.
    Dividing by a standard deviation would add another bias.

    A turn at which all stand-ins are equal gets exactly 0, and so does a group of one usable trajectory. Rewards of
    single tokens count as if they came with the last turn, because they are part of s_i and of no turn.

    Left out: the comparison of turns with equal histories only, which needs sampling from the same turn.

    ``returns`` are G.
    """

    config: TurnRLOOConfig

    def __call__(self, batch: AdvantageInput) -> AdvantageOutput:
        trajectories = Trajectories(batch)
        rewards_MT = trajectories.of_rows(batch.turn_rewards)
        turns_T = torch.arange(rewards_MT.shape[1])
        last_M = trajectories.last_turns(batch.turn_ids)
        rest_M = trajectories.scores_M - rewards_MT.sum(-1)
        returns_MT = rewards_MT.scatter_add(1, last_M[:, None], rest_M[:, None])
        for turn in reversed(range(len(turns_T) - 1)):
            returns_MT[:, turn] += self.config.turn_gamma * returns_MT[:, turn + 1]
        stand_in_MT = returns_MT.gather(1, torch.minimum(turns_T, last_M[:, None]))

        group_turn_MT = trajectories.group_M[:, None] * len(turns_T) + turns_T
        centred_MT = stand_in_MT - means(stand_in_MT.flatten(), group_turn_MT.flatten()).view_as(stand_in_MT)
        votes_M = trajectories.votes_M
        advantages_MT = centred_MT * (votes_M / (votes_M - 1).clamp(min=1))[:, None]
        advantages_MT = torch.where(turns_T <= last_M[:, None], advantages_MT, 0.0)
        return AdvantageOutput(
            trajectories.spread_turns(advantages_MT, batch.turn_ids),
            trajectories.spread_turns(returns_MT, batch.turn_ids),
        )
