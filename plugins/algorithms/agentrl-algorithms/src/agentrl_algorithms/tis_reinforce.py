"""REINFORCE with truncated importance weights. Shapes: b rows of a micro-batch, R response tokens."""

import torch

from agentrl_algorithms.config import TISReinforceConfig
from agentrl_algorithms.ratio import bounded_exp, log_ratio
from agentrl_core.api import PolicyLoss, PolicyLossInput, PolicyLossOutput


class TISReinforce(PolicyLoss):
    r"""Policy gradient from tokens that mu, the engine's policy, sampled. Truncated importance sampling is in IMPALA,
    arXiv 1802.01561 (rho-bar); for the difference between engine and trainer of language models it is in
    Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training". As a loss:

        ratio = pi(a_t) / mu(a_t)
        loss  = -sg[min(ratio, max_ratio)] * A * log pi(a_t)

    One weight corrects for the engine's arithmetic, for old weights and for the optimizer steps since: leave
    ``algorithm.correction`` null, which would count the first two twice.

    Left out: a trust region; weights of whole sequences.

    Metrics: ``ratio``; ``clip_fraction``, 1 where the weight was truncated; ``ppo_kl``, log mu - log pi.
    """

    config: TISReinforceConfig

    def __call__(self, batch: PolicyLossInput) -> PolicyLossOutput:
        if batch.rollout_log_probs is None:
            raise ValueError("tis_reinforce needs rollout_log_probs: use an engine with the capability 'logprobs'")
        mask_bR = batch.response_mask.bool()
        log_ratio_bR = log_ratio(batch.log_probs, batch.rollout_log_probs, mask_bR).detach()
        ratio_bR = bounded_exp(log_ratio_bR)
        weights_bR = ratio_bR.clamp(max=self.config.max_ratio)
        advantages_bR = torch.where(mask_bR, batch.advantages, 0.0)
        log_probs_bR = torch.where(mask_bR, batch.log_probs, 0.0)
        metrics = {"ratio": ratio_bR, "clip_fraction": (ratio_bR > weights_bR).float(), "ppo_kl": -log_ratio_bR}
        return PolicyLossOutput(-weights_bR * advantages_bR * log_probs_bR, metrics)
