"""How per-token losses become one number, exactly, however a mini-batch is cut into micro-batches.

    loss = sum of weighted token losses / denominator

The denominator belongs to the whole mini-batch and the sum runs over a micro-batch, so that the micro-batches' losses
(and gradients) add up to those of the mini-batch. With N sampled tokens in M rows that have any:

    token-mean               sum_it l_it / N                          DAPO, arXiv 2503.14476, equation 8
    token-sum                sum_it l_it                              the sum in the policy gradient, not averaged
    seq-mean-token-sum       sum_i (sum_t l_it) / M
    seq-mean-token-mean      sum_i (sum_t l_it / |o_i|) / M           GRPO, arXiv 2402.03300, equation 3
    seq-mean-token-sum-norm  sum_i (sum_t l_it) / (M * L_max)         Dr. GRPO, arXiv 2503.20783, section 3.2

L_max is the longest response that is allowed, a constant. With token-sum the gradient grows with the mini-batch, so the
learning rate belongs to one size of it, and ``grad_clip`` cuts more. Rows without a sampled token count nowhere. Where
the mask is all zero the result is 0.

Shapes: B rows, R response tokens.
"""

from typing import get_args

import torch
from torch import Tensor

from agentrl_core.config.schema import Aggregation


def denominator(mask_BR: Tensor, mode: Aggregation, max_response_length: int) -> float:
    """What sums over (parts of) this mini-batch are divided by; at least 1.

    Args:
        mask_BR: [B, R] bool of the whole mini-batch.
        mode: see the module's docstring.
        max_response_length: L_max in tokens, for seq-mean-token-sum-norm.
    """
    if mode == "token-sum":
        return 1.0
    if mode == "token-mean":
        return float(max(int(mask_BR.sum()), 1))
    rows = float(max(int(mask_BR.any(-1).sum()), 1))
    return rows * max_response_length if mode == "seq-mean-token-sum-norm" else rows


def aggregate(losses_BR: Tensor, mask_BR: Tensor, mode: Aggregation, denominator: float) -> Tensor:
    """The part [] of the mini-batch's loss that these rows contribute.

    Args:
        losses_BR: [B, R] float32; what stands under mask 0 is not read.
        mask_BR: [B, R] bool.
        mode: see the module's docstring.
        denominator: of the mini-batch that the rows belong to, from :func:`denominator`.

    Raises ValueError for an unknown mode.
    """
    losses_BR = torch.where(mask_BR.bool(), losses_BR, 0.0)
    if mode == "seq-mean-token-mean":
        losses_BR = losses_BR / mask_BR.sum(-1, keepdim=True).clamp(min=1)
    elif mode not in get_args(Aggregation):
        raise ValueError(f"aggregation is {mode!r}, it must be one of {', '.join(get_args(Aggregation))}")
    return losses_BR.sum() / denominator
