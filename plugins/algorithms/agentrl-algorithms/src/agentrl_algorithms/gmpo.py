"""Geometric-mean policy optimisation. Shapes: b rows of a micro-batch, R response tokens."""

import torch

from agentrl_algorithms.config import GMPOConfig
from agentrl_algorithms.ratio import bounded_exp, log_ratio, row_mean
from agentrl_core.api import PolicyLoss, PolicyLossInput, PolicyLossOutput


class GMPO(PolicyLoss):
    r"""GMPO, arXiv 2507.20673, as a loss to be minimised. With the sign of A as s:

        d_t  = log(pi(a_t) / pi_old(a_t))
        c_t  = s * min(s * d_t, s * clip(d_t, -clip_low, clip_high))
        loss = -A * exp(1/|o_i| * sum_t c_t)                            the same for every token of the row

    The paper clips ratios to (e^-0.4, e^0.4), so that ``clip_low`` and ``clip_high`` are log-ratios. It averages over
    rows: ``algorithm.aggregation: seq-mean-token-mean``. Its advantages are those of whole answers; A is the mean of
    the row's.

    Left out: the KL term, which the workers add. The mean log-ratio is cut at +-20, which only a broken batch reaches.

    Metrics: ``ratio``, the geometric mean; ``clip_fraction``, 1 where the clip took the token's gradient; ``ppo_kl``.
    """

    config: GMPOConfig

    def __call__(self, batch: PolicyLossInput) -> PolicyLossOutput:
        mask_bR = batch.response_mask.bool()
        log_ratio_bR = log_ratio(batch.log_probs, batch.old_log_probs, mask_bR)
        advantages_b1 = row_mean(batch.advantages, mask_bR)
        sign_b1 = advantages_b1.sign()
        clipped_bR = log_ratio_bR.clamp(-self.config.clip_low, self.config.clip_high)
        chosen_bR = sign_b1 * torch.minimum(sign_b1 * log_ratio_bR, sign_b1 * clipped_bR)
        ratio_b1 = bounded_exp(row_mean(chosen_bR, mask_bR))
        metrics = {
            "ratio": ratio_b1.detach().expand_as(log_ratio_bR),
            "clip_fraction": (sign_b1 * clipped_bR < sign_b1 * log_ratio_bR).float(),
            "ppo_kl": -log_ratio_bR.detach(),
        }
        return PolicyLossOutput((-advantages_b1 * ratio_b1).expand_as(log_ratio_bR), metrics)
