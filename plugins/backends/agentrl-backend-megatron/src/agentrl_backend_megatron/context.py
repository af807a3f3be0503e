"""Rows that are split over ranks (context parallelism), as Megatron-Core's layers expect it.

A row is cut into twice as many chunks as there are ranks. Rank i has the chunks i and, from the end, i: with causal
attention all ranks then have as much to compute.

Shapes: s tokens of a row, c of a rank's part of it; n sampled tokens, m those of them that this rank predicts.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def own_positions(length: int, rank: int, size: int, device: torch.device) -> Tensor:
    """Positions [c] in a row of the tokens that a rank has.

    Args:
        length: of the row, a multiple of ``2 * size``; of any length with one rank.
    """
    positions_s = torch.arange(length, device=device)
    if size == 1:
        return positions_s
    return positions_s.view(2 * size, -1)[[rank, 2 * size - 1 - rank]].flatten()


def gathered(values_m: Tensor, is_own_n: Tensor, group: Any) -> Tensor:
    """The values [n] of all ranks. Every rank then computes the same loss, and takes back the gradient of its own."""
    found: Tensor = _Gathered.apply(values_m, is_own_n, group)  # type: ignore[no-untyped-call]
    return found


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_m: Tensor, is_own_n: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(is_own_n)
        values_n = values_m.new_zeros(is_own_n.shape).masked_scatter_(is_own_n, values_m)
        dist.all_reduce(values_n, group=group)
        return values_n

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (is_own_n,) = ctx.saved_tensors
        return gradients[0][is_own_n], None, None
