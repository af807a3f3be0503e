"""Clipped importance-sampling weights. Shapes: b rows of a micro-batch, R response tokens."""

import torch

from agentrl_algorithms.config import CISPOConfig
from agentrl_algorithms.ratio import bounded_exp, log_ratio
from agentrl_core.api import PolicyLoss, PolicyLossInput, PolicyLossOutput


class CISPO(PolicyLoss):
    r"""CISPO, arXiv 2506.13585, equations 4 and 5, as a loss to be minimised:

        ratio = pi(a_t) / pi_old(a_t)
        loss  = -sg[clip(ratio, 1 - clip_low, 1 + clip_high)] * A * log pi(a_t)

    Unlike PPO's, the clip bounds a weight and takes the gradient from no token. The paper sets no lower bound, which is
    ``clip_low: 1``, and does not give its upper one; the default, a largest weight of 5, is from ScaleRL (arXiv
    2510.13786). The paper averages over all tokens: ``algorithm.aggregation: token-mean``.

    Left out: the paper's unified form with a token mask, which includes PPO.

    Metrics: ``ratio``, not clipped; ``clip_fraction``, 1 where the weight was clipped; ``ppo_kl``.
    """

    config: CISPOConfig

    def __call__(self, batch: PolicyLossInput) -> PolicyLossOutput:
        mask_bR = batch.response_mask.bool()
        log_ratio_bR = log_ratio(batch.log_probs, batch.old_log_probs, mask_bR).detach()
        ratio_bR = bounded_exp(log_ratio_bR)
        weights_bR = ratio_bR.clamp(1 - self.config.clip_low, 1 + self.config.clip_high)
        advantages_bR = torch.where(mask_bR, batch.advantages, 0.0)
        log_probs_bR = torch.where(mask_bR, batch.log_probs, 0.0)
        metrics = {"ratio": ratio_bR, "clip_fraction": (weights_bR != ratio_bR).float(), "ppo_kl": -log_ratio_bR}
        return PolicyLossOutput(-weights_bR * advantages_bR * log_probs_bR, metrics)
