"""KL-Cov. Shapes: M rows of a mini-batch, b of a micro-batch, R response tokens."""

import torch

from agentrl_algorithms.clip_cov import covariances, largest
from agentrl_algorithms.config import KLCovConfig
from agentrl_algorithms.ratio import bounded_exp, log_ratio
from agentrl_core.api import PolicyLoss, PolicyLossInput, PolicyLossOutput, PreparedLoss


class KLCov(PolicyLoss):
    r"""KL-Cov, arXiv 2505.22617, as a loss to be minimised:

        ratio = pi(a_t) / pi_old(a_t)
        Cov_t = (log pi(a_t) - mean log pi) * (A_t - mean A)                     means over the mini-batch
        loss  = -A * ratio + kl_coef * (ratio - 1 - log ratio)    for the share of tokens with the largest Cov_t
              = -A * ratio                                        for all others

    The penalty estimates KL(pi_old || pi) without bias, and so does its gradient. It holds back those tokens alone that
    drive entropy down; there is no clip. It does not vanish where the advantage is 0, and so no row is left out of the
    backward pass.

    Left out: the authors' code has |log ratio| as the estimate, which has no gradient at ratio 1, where every first
    update begins: there the sign of a rounding error would decide. The log-ratio is cut at +-20.

    Metrics: ``ratio``; ``kl_fraction``, the share of tokens with a penalty; ``ppo_kl``.
    """

    config: KLCovConfig

    def prepare(self, batch: PolicyLossInput) -> PreparedLoss:
        mask_MR = batch.response_mask.bool()
        penalised_MR = largest(covariances(batch), mask_MR, self.config.share, int(mask_MR.sum()))
        return PreparedLoss({"penalised": penalised_MR})

    def __call__(self, batch: PolicyLossInput) -> PolicyLossOutput:
        mask_bR = batch.response_mask.bool()
        penalised_bR = batch.columns["penalised"]
        log_ratio_bR = log_ratio(batch.log_probs, batch.old_log_probs, mask_bR)
        ratio_bR = bounded_exp(log_ratio_bR)
        penalty_bR = self.config.kl_coef * penalised_bR * (ratio_bR - 1 - log_ratio_bR)
        losses_bR = -torch.where(mask_bR, batch.advantages, 0.0) * ratio_bR + penalty_bR
        metrics = {"ratio": ratio_bR.detach(), "kl_fraction": penalised_bR, "ppo_kl": -log_ratio_bR.detach()}
        return PolicyLossOutput(losses_bR, metrics)
