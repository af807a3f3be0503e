"""Divergence proximal policy optimisation. Shapes: b rows of a micro-batch, R response tokens."""

import torch
from torch import Tensor

from agentrl_algorithms.config import DPPOConfig
from agentrl_algorithms.ratio import bounded_exp, log_ratio
from agentrl_core.api import PolicyLoss, PolicyLossInput, PolicyLossOutput

THRESHOLDS = {"tv": 0.15, "kl": 0.05}
"""Those of the paper's experiments."""
TINY = 1e-7
"""Keeps 1 - p above 0 in float32."""


class DPPO(PolicyLoss):
    r"""DPPO with the binary approximation of the divergence, arXiv 2602.04879, as a loss to be minimised. mu is the
    engine's policy, which sampled the tokens:

        ratio = pi(a_t) / mu(a_t)
        D     = |mu - pi|                                            divergence: tv
              = mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi))  divergence: kl
        M     = 0 where D > threshold and the step would go on away from mu: A > 0 and ratio > 1, or A < 0 and ratio < 1
        loss  = -sg[M * min(ratio, max_ratio)] * A * log pi(a_t)

    PPO's clip looks at the ratio alone, so that an unlikely token may hardly move and a likely one may take the whole
    distribution with it; the divergence weighs both by their probability. mu as the anchor also corrects for the
    difference between engine and trainer: leave ``algorithm.correction`` null.

    Left out: the top-k approximation, which needs the engine's distributions; asymmetric thresholds.

    Metrics: ``ratio``; ``divergence``; ``clip_fraction``, 1 where M is 0; ``ppo_kl``, log mu - log pi.
    """

    config: DPPOConfig

    def __call__(self, batch: PolicyLossInput) -> PolicyLossOutput:
        if batch.rollout_log_probs is None:
            raise ValueError("dppo needs rollout_log_probs: use an engine with the capability 'logprobs'")
        mask_bR = batch.response_mask.bool()
        log_probs_bR = torch.where(mask_bR, batch.log_probs, 0.0)
        log_ratio_bR = log_ratio(batch.log_probs, batch.rollout_log_probs, mask_bR).detach()
        ratio_bR = bounded_exp(log_ratio_bR)
        advantages_bR = torch.where(mask_bR, batch.advantages, 0.0)

        divergence_bR = self._divergence(log_probs_bR.detach(), log_ratio_bR)
        threshold = THRESHOLDS[self.config.divergence] if self.config.threshold is None else self.config.threshold
        masked_bR = (divergence_bR > threshold) & (advantages_bR * log_ratio_bR > 0)
        weights_bR = torch.where(masked_bR, 0.0, ratio_bR.clamp(max=self.config.max_ratio))
        metrics = {
            "ratio": ratio_bR,
            "divergence": divergence_bR,
            "clip_fraction": masked_bR.float(),
            "ppo_kl": -log_ratio_bR,
        }
        return PolicyLossOutput(-weights_bR * advantages_bR * log_probs_bR, metrics)

    def _divergence(self, log_probs_bR: Tensor, log_ratio_bR: Tensor) -> Tensor:
        """D [b, R]: of the distributions {sampled token, any other one}."""
        sampled_bR = (log_probs_bR - log_ratio_bR).exp()
        if self.config.divergence == "tv":
            return (sampled_bR - log_probs_bR.exp()).abs()
        others_bR = (1 - sampled_bR).clamp(min=TINY)
        now_others_bR = (1 - log_probs_bR.exp()).clamp(min=TINY)
        return -sampled_bR * log_ratio_bR + others_bR * (others_bR.log() - now_others_bR.log())
