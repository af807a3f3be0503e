"""The group baselines, one per token or per turn, that minimise the variance of the policy gradient.

Shapes: B rows, R response tokens, M trajectories, N sampled tokens in the order of trajectory, turn and position,
S steps of all trajectories: tokens, or turns.
"""

import torch
from torch import Tensor

from agentrl_algorithms.groups import Trajectories, means, sums
from agentrl_core.api import AdvantageEstimator, AdvantageInput, AdvantageOutput


class OptimalTokenBaseline(AdvantageEstimator):
    r"""The optimal token baseline, arXiv 2602.07078.

        A_it = G_it - B_t,       B_t = (sum of W_jt G_jt) / (sum of W_jt)        over the trajectories j with a token t
        W_it = w_i1 c_i1^2 + … + w_it c_it^2
        w    = |grad of log pi(a) by the logits|^2 = 1 - 2 pi(a) + sum over v of pi(v)^2

    ``c`` is the factor of the token's loss that ``algorithm.correction`` has set, 1 without one: gradients have it too.

    ``G_it`` is what trajectory i earns from token t on. ``t`` counts the sampled tokens of a trajectory over all its
    turns and rows; tool results are skipped, so this is also the form for tool-integrated reasoning.

    w is estimated. With p = pi(a) and H' the entropy of the other tokens, renormalised, which follows from p and the
    entropy of pi,

        w = (1 - p)^2 + (sum over v ≠ a of pi(v)^2)  ≈  (1 - p)^2 (1 + exp(-H'))

    It is a lower bound, at least half of w, and exact where the other tokens are equally likely (Jensen).

    Where only one trajectory is left, the baseline is that of the last t that two had. Groups of one usable
    trajectory, and groups with equal scores and no other rewards, get exactly 0.

    Left out: a baseline of 0 for the last trajectory left, which would reward length where all scores are positive.

    ``returns`` are G. Raises ValueError where the batch has no old log-probs or entropies.
    """

    def __call__(self, batch: AdvantageInput) -> AdvantageOutput:
        if batch.old_log_probs is None or batch.entropies is None:
            raise ValueError("the optimal baseline needs old log-probs and entropies, and the batch lacks one of them")
        trajectories = Trajectories(batch)
        rows_N, positions_N = trajectories.mask_BR.nonzero(as_tuple=True)
        turns = batch.turn_rewards.shape[1]
        turn_N = trajectories.trajectory_B[rows_N] * turns + batch.turn_ids[rows_N, positions_N]
        turn_N, order_N = turn_N.sort(stable=True)
        tokens = rows_N[order_N], positions_N[order_N]
        step_N = self.steps(turn_N)
        first_S = _begins(step_N).nonzero().squeeze(-1)
        trajectory_S = trajectories.trajectory_B[tokens[0][first_S]]

        energy_N = score_norms(batch.old_log_probs[tokens].double(), batch.entropies[tokens].double())
        if batch.correction_weights is not None:
            energy_N = energy_N * batch.correction_weights[tokens].double().square()
        energy_S = sums(energy_N, step_N, len(first_S))
        earlier_N = _earlier(_rewards_without_outcomes(batch)[tokens], trajectories.trajectory_B[tokens[0]])
        returns_S = trajectories.scores_M[trajectory_S] - earlier_N[first_S]
        advantages_S = _compare(returns_S, energy_S, trajectory_S, trajectories)

        advantages_BR, returns_BR = torch.zeros(trajectories.mask_BR.shape), torch.zeros(trajectories.mask_BR.shape)
        advantages_BR[tokens], returns_BR[tokens] = advantages_S[step_N].float(), returns_S[step_N].float()
        return AdvantageOutput(advantages_BR, returns_BR)

    def steps(self, turn_N: Tensor) -> Tensor:
        """[N]: number of each token's step, ascending from 0, given numbers of turns that are unique in the batch."""
        return torch.arange(len(turn_N))


class OptimalTurnBaseline(OptimalTokenBaseline):
    """``optimal_token_baseline`` with turns as steps: B_k compares the returns of all trajectories that have a turn k.

    Tokens with the same number say little about each other after the first tool call; turns do. The energy w of a turn
    is the sum over its tokens, so W_k is what had been gathered when turn k ended; G_k counts from the turn's first
    token on. The paper has no such form; its argument holds for turns as actions. Everything else is as there.
    """

    def steps(self, turn_N: Tensor) -> Tensor:
        return torch.unique_consecutive(turn_N, return_inverse=True)[1]


def score_norms(log_probs_N: Tensor, entropies_N: Tensor) -> Tensor:
    """[N]: estimates of the squared norm of the score of sampled tokens with respect to the logits, in [0, 2]."""
    others_N = -torch.expm1(log_probs_N).clamp(max=-1e-12)
    entropy_N = (entropies_N + log_probs_N.exp() * log_probs_N + others_N * others_N.log()) / others_N
    return others_N.square() * (1 + torch.exp(-entropy_N.clamp(min=0)))


def _compare(returns_S: Tensor, energy_S: Tensor, trajectory_S: Tensor, trajectories: Trajectories) -> Tensor:
    """[S]: returns minus the baseline of the step's number in the group."""
    all_S = torch.arange(len(returns_S))
    length_M = torch.bincount(trajectory_S, minlength=len(trajectories.group_M))
    start_S = (length_M.cumsum(0) - length_M)[trajectory_S]
    numbers_S = trajectories.group_M[trajectory_S] * (len(all_S) + 1) + all_S - start_S
    _, same_S, count_X = numbers_S.unique(return_inverse=True, return_counts=True)
    weight_S = _earlier(energy_S, trajectory_S) + energy_S + 1e-12
    baseline_S = means(returns_S, same_S, weight_S)

    shared_S = sums((count_X[same_S] > 1).long(), trajectory_S, len(length_M))[trajectory_S]
    at_S = torch.minimum(all_S, start_S + (shared_S - 1).clamp(min=0))
    return torch.where(shared_S > 0, returns_S - baseline_S[at_S], 0.0)


def _earlier(values_N: Tensor, trajectory_N: Tensor) -> Tensor:
    """[N]: sum of the trajectory's values before this one; the items of a trajectory are neighbours."""
    before_N = torch.nn.functional.pad(values_N.cumsum(0), (1, 0))[:-1]
    begins_N = _begins(trajectory_N)
    return before_N - before_N[begins_N][begins_N.cumsum(0) - 1]


def _begins(index_N: Tensor) -> Tensor:
    """[N] bool: the index differs from the one before."""
    begins_N = torch.ones_like(index_N, dtype=torch.bool)
    begins_N[1:] = index_N[1:] != index_N[:-1]
    return begins_N


def _rewards_without_outcomes(batch: AdvantageInput) -> Tensor:
    """[B, R] float64: rewards where they were earned, but for the outcome on each row's last token."""
    mask_BR = batch.response_mask.bool()
    rewards_BR = torch.where(mask_BR, batch.token_rewards.double(), 0.0)
    rows_B = mask_BR.any(-1).nonzero().squeeze(-1)
    last_B = (mask_BR * torch.arange(1, mask_BR.shape[1] + 1))[rows_B].argmax(-1)
    rewards_BR[rows_B, last_B] -= batch.outcomes[rows_B].double()
    return rewards_BR
