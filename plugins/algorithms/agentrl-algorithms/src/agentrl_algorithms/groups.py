"""What group-relative estimators share: the trajectories of a batch with one vote each, and statistics of groups.

Shapes: B rows, R response tokens, T turns, M trajectories that have a sampled token, N items of any kind.
"""

import torch
from torch import Tensor

from agentrl_core.api import AdvantageInput, AdvantageOutput

EPS = 1e-6
"""Added to a standard deviation, so that differences as small as rounding errors do not become advantages."""


class Trajectories:
    """The trajectories of a batch. One without a sampled token is not among them, so it has no vote.

    Args:
        batch: rows of one trajectory share ``group_ids`` and ``trajectory_ids``.
    """

    def __init__(self, batch: AdvantageInput) -> None:
        self.mask_BR = batch.response_mask.bool()
        numbers: dict[object, int] = {}
        groups: dict[object, int] = {}
        self.trajectory_B = torch.full((len(self.mask_BR),), -1)
        first_rows, group_of = [], []
        for row in self.mask_BR.any(-1).nonzero().squeeze(-1).tolist():
            key = (batch.group_ids[row], batch.trajectory_ids[row])
            if key not in numbers:
                numbers[key] = len(numbers)
                first_rows.append(row)
                group_of.append(groups.setdefault(key[0], len(groups)))
            self.trajectory_B[row] = numbers[key]
        self.first_rows_M = torch.tensor(first_rows, dtype=torch.long)
        self.group_M = torch.tensor(group_of, dtype=torch.long)
        self.groups = len(groups)
        self.votes_M = torch.bincount(self.group_M, minlength=self.groups)[self.group_M]
        self.scores_M = self.of_rows(batch.scores)

    def of_rows(self, values_B: Tensor) -> Tensor:
        """[M, …] float64: what each trajectory's rows carry, which is the same in all of them."""
        return values_B[self.first_rows_M].double()

    def lengths(self) -> Tensor:
        """[M] float64: sampled tokens of each trajectory."""
        used_B = self.trajectory_B >= 0
        return sums(self.mask_BR.sum(-1)[used_B].double(), self.trajectory_B[used_B], len(self.group_M))

    def last_turns(self, turn_ids_BR: Tensor) -> Tensor:
        """[M] int64: number of each trajectory's last turn."""
        used_B = self.trajectory_B >= 0
        last_M = torch.zeros_like(self.group_M)
        return last_M.scatter_reduce_(0, self.trajectory_B[used_B], turn_ids_BR[used_B].amax(-1), "amax")

    def spread(self, values_M: Tensor) -> Tensor:
        """[B, R] float32: each trajectory's value on its sampled tokens, and 0 elsewhere."""
        with_zero = torch.nn.functional.pad(values_M.float(), (0, 1))
        return torch.where(self.mask_BR, with_zero[self.trajectory_B][:, None], 0.0)

    def spread_turns(self, values_MT: Tensor, turn_ids_BR: Tensor) -> Tensor:
        """[B, R] float32: the value of each trajectory's turn on the turn's sampled tokens, and 0 elsewhere."""
        with_zero = torch.nn.functional.pad(values_MT.float(), (0, 1, 0, 1))
        return torch.where(self.mask_BR, with_zero[self.trajectory_B[:, None], turn_ids_BR], 0.0)

    def output(self, advantages_M: Tensor) -> AdvantageOutput:
        """Group-relative advantages; ``returns`` are the scores."""
        return AdvantageOutput(self.spread(advantages_M), self.spread(self.scores_M))


def sums(values_N: Tensor, index_N: Tensor, size: int) -> Tensor:
    """[size]: sum of the values that share an index."""
    return values_N.new_zeros(size).index_add_(0, index_N, values_N)


def means(values_N: Tensor, index_N: Tensor, weights_N: Tensor | None = None) -> Tensor:
    """[N]: at each item, the mean of the items that share its index. Equal values have exactly their value as mean.

    Args:
        weights_N: positive; all equal if left out.
    """
    size = int(index_N.max()) + 1 if len(index_N) else 0
    weights_N = torch.ones_like(values_N) if weights_N is None else weights_N
    lowest = values_N.new_full((size,), torch.inf).scatter_reduce_(0, index_N, values_N, "amin")[index_N]
    above = sums((values_N - lowest) * weights_N, index_N, size) / sums(weights_N, index_N, size)
    return lowest + above[index_N]


def standardised(values_N: Tensor, index_N: Tensor, eps: float = EPS) -> Tensor:
    """[N]: values minus their mean, over their sample standard deviation (divisor n - 1), both within an index.

    Equal values and a single one give exactly 0.
    """
    centred_N = values_N - means(values_N, index_N)
    count_N = torch.bincount(index_N)[index_N] if len(index_N) else index_N
    squares_N = means(centred_N.square(), index_N)
    return centred_N / ((squares_N * count_N / (count_N - 1).clamp(min=1)).sqrt() + eps)


def scaled(centred_M: Tensor) -> Tensor:
    """[M]: values over their standard deviation (divisor M - 1) in the whole batch, where their mean is 0 already.

    Advantages that are centred in each group have the mean 0 in the batch, so exact zeros stay zeros.
    """
    return centred_M / ((centred_M.square().sum() / max(len(centred_M) - 1, 1)).sqrt() + EPS)


def whiten(values_BR: Tensor, mask_BR: Tensor, eps: float = 1e-8) -> Tensor:
    """Values with mean 0 and (biased) variance 1 over mask 1, and 0 under mask 0; fewer than two are left alone."""
    selected_N = values_BR[mask_BR].double()
    if len(selected_N) < 2:
        return values_BR
    centred_N = selected_N - means(selected_N, torch.zeros(len(selected_N), dtype=torch.long))
    whitened_BR = torch.zeros_like(values_BR)
    whitened_BR[mask_BR] = (centred_N * torch.rsqrt(centred_N.square().mean() + eps)).to(values_BR.dtype)
    return whitened_BR
