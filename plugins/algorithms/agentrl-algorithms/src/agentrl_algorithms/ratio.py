"""Ratios of one policy to an earlier one. Shapes: b rows, R response tokens."""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Beyond it the ratio (4.9e8) says only that the log-probs do not belong to this batch; exp must not overflow."""


def log_ratio(log_probs_bR: Tensor, earlier_bR: Tensor, mask_bR: Tensor) -> Tensor:
    """log pi - log pi_earlier [b, R], 0 and without a gradient under mask 0, whatever the fillers there are."""
    return torch.where(mask_bR, log_probs_bR - earlier_bR, 0.0)


def bounded_exp(log_ratio_bR: Tensor) -> Tensor:
    """exp, for log-ratios cut to +-:data:`MAX_LOG_RATIO`."""
    return log_ratio_bR.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def row_mean(values_bR: Tensor, mask_bR: Tensor) -> Tensor:
    """Mean [b, 1] over each row's sampled tokens; 0 for a row that has none."""
    return torch.where(mask_bR, values_bR, 0.0).sum(-1, keepdim=True) / mask_bR.sum(-1, keepdim=True).clamp(min=1)
