"""Group relative advantages: each sample is compared with the other samples of its prompt.

Shapes: B rows, R response tokens, T trajectories, G groups.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from agentrl_algorithms.config import GRPOConfig
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

    Left out: process supervision (section 4.1.3), because rewards here belong to whole trajectories; the KL term,
    which is part of the loss and not of the advantage.

    ``returns`` are the trajectory's score on every sampled token. Metrics: ``groups_without_signal``, the
    share of groups whose advantage is 0 throughout, among groups with a usable trajectory.
    """

    config: GRPOConfig

    def __call__(self, batch: AdvantageInput) -> AdvantageOutput:
        mask_BR = batch.response_mask.bool()
        usable_B = mask_BR.any(-1)
        group_B, groups = _number(batch.group_ids)
        trajectory_B, trajectories = _number(zip(batch.group_ids, batch.trajectory_ids, strict=True))

        rows_T = _sums(usable_B.double(), trajectory_B, trajectories)
        usable_T = rows_T > 0
        scores_T = _sums(batch.scores.double() * usable_B, trajectory_B, trajectories) / rows_T.clamp(min=1)
        group_T = torch.empty(trajectories, dtype=torch.long).scatter_(0, trajectory_B, group_B)
        advantages_T, has_signal_G, usable_G = self._compare(scores_T, usable_T, group_T, groups)

        zero = torch.zeros((), dtype=torch.float32)
        advantages_BR = torch.where(mask_BR, advantages_T[trajectory_B].float()[:, None], zero)
        returns_BR = torch.where(mask_BR, scores_T[trajectory_B].float()[:, None], zero)
        without_signal = (usable_G & ~has_signal_G).sum() / usable_G.sum().clamp(min=1)
        return AdvantageOutput(advantages_BR, returns_BR, {"groups_without_signal": float(without_signal)})

    def _compare(
        self, scores_T: Tensor, usable_T: Tensor, group_T: Tensor, groups: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Advantages [T] (0 where not usable); [G] bool: scores differ; [G] bool: a trajectory is usable."""
        votes_G = _sums(usable_T.double(), group_T, groups)
        mean_G = _sums(scores_T * usable_T, group_T, groups) / votes_G.clamp(min=1)
        centred_T = (scores_T - mean_G[group_T]) * usable_T
        lowest_G = scores_T.new_full((groups,), torch.inf).scatter_reduce_(
            0, group_T, torch.where(usable_T, scores_T, torch.inf), "amin"
        )
        highest_G = scores_T.new_full((groups,), -torch.inf).scatter_reduce_(
            0, group_T, torch.where(usable_T, scores_T, -torch.inf), "amax"
        )
        has_signal_G = highest_G > lowest_G
        if self.config.norm_by_std:
            std_G = (_sums(centred_T.square(), group_T, groups) / (votes_G - 1).clamp(min=1)).sqrt()
            centred_T = centred_T / (std_G + self.config.eps)[group_T]
        return torch.where(has_signal_G[group_T], centred_T, 0.0), has_signal_G, votes_G > 0


def _number(ids: Iterable[object]) -> tuple[Tensor, int]:
    """Numbers [B] from 0 in order of first appearance, equal where the ids are, and how many there are."""
    seen: dict[object, int] = {}
    numbers_B = torch.tensor([seen.setdefault(key, len(seen)) for key in ids], dtype=torch.long)
    return numbers_B, len(seen)


def _sums(values: Tensor, index: Tensor, size: int) -> Tensor:
    return values.new_zeros(size).index_add_(0, index, values)
