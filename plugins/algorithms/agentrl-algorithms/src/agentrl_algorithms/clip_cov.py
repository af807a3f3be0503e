"""Clip-Cov. Shapes: M rows of a mini-batch, b of a micro-batch, R response tokens."""

from dataclasses import replace

import torch
from torch import Tensor

from agentrl_algorithms.config import ClipCovConfig
from agentrl_algorithms.ppo import clipped_surrogate
from agentrl_core.api import PolicyLoss, PolicyLossInput, PolicyLossOutput, PreparedLoss


def covariances(batch: PolicyLossInput) -> Tensor:
    """(log pi - mean log pi) * (A - mean A) [M, R] float64, means over sampled tokens; 0 under mask 0."""
    mask_MR = batch.response_mask.bool()
    log_probs_MR, advantages_MR = batch.log_probs.double(), batch.advantages.double()
    count = mask_MR.sum().clamp(min=1)
    centred = [
        values_MR - torch.where(mask_MR, values_MR, 0.0).sum() / count for values_MR in (log_probs_MR, advantages_MR)
    ]
    return torch.where(mask_MR, centred[0] * centred[1], 0.0)


def largest(values_MR: Tensor, candidates_MR: Tensor, share: float, tokens: int) -> Tensor:
    """[M, R] float32: 1 for the ``share`` of ``tokens`` (at least one) with the largest values among the candidates."""
    count = min(max(int(share * tokens), 1), int(candidates_MR.sum()))
    order = values_MR.masked_fill(~candidates_MR, -torch.inf).flatten().argsort(descending=True, stable=True)
    chosen = torch.zeros(values_MR.numel(), device=values_MR.device)
    chosen[order[:count]] = 1.0
    return chosen.view_as(values_MR)


class ClipCov(PolicyLoss):
    r"""Clip-Cov, arXiv 2505.22617, as a loss to be minimised:

        Cov_t = (log pi(a_t) - mean log pi) * (A_t - mean A)        means over the mini-batch
        loss  = 0 for a share of the tokens with Cov_t in (cov_low, cov_high), PPO's loss for all others

    Tokens of high covariance drive entropy down; without their gradient it stays up. Tokens that PPO clips already are
    no candidates. The paper draws the share at random among the candidates; here it is those with the largest
    covariance, so that a step can be repeated and does not depend on micro-batches or ranks.

    Left out: the random choice. The dual clip.

    Metrics: those of ``ppo``, and ``cov_clip_fraction``, the share of tokens that lost their gradient.
    """

    config: ClipCovConfig

    def prepare(self, batch: PolicyLossInput) -> PreparedLoss:
        mask_MR = batch.response_mask.bool()
        cov_MR = covariances(batch)
        clipped_MR = clipped_surrogate(batch, self.config.clip_low, self.config.clip_high).metrics["clip_fraction"] > 0
        candidates_MR = mask_MR & ~clipped_MR & (cov_MR > self.config.cov_low) & (cov_MR < self.config.cov_high)
        return PreparedLoss({"clipped": largest(cov_MR, candidates_MR, self.config.share, int(mask_MR.sum()))})

    def __call__(self, batch: PolicyLossInput) -> PolicyLossOutput:
        output = clipped_surrogate(batch, self.config.clip_low, self.config.clip_high)
        clipped_bR = batch.columns["clipped"]
        losses_bR = output.losses.masked_fill(clipped_bR > 0, 0.0)
        return replace(output, losses=losses_bR, metrics={**output.metrics, "cov_clip_fraction": clipped_bR})
