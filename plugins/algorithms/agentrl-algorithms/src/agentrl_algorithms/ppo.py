"""The clipped surrogate objective.

Shapes: b rows of a micro-batch, R response tokens.
"""

from dataclasses import replace

import torch

from agentrl_algorithms.config import PPOConfig
from agentrl_algorithms.ratio import bounded_exp, log_ratio
from agentrl_core.api import PolicyLoss, PolicyLossInput, PolicyLossOutput


def clipped_surrogate(batch: PolicyLossInput, clip_low: float, clip_high: float) -> PolicyLossOutput:
    """PPO's loss without the dual clip, with the metrics ``ratio``, ``clip_fraction`` and ``ppo_kl``."""
    mask_bR = batch.response_mask.bool()
    log_ratio_bR = log_ratio(batch.log_probs, batch.old_log_probs, mask_bR)
    ratio_bR = bounded_exp(log_ratio_bR)
    advantages_bR = torch.where(mask_bR, batch.advantages, 0.0)

    plain_bR = -advantages_bR * ratio_bR
    clipped_bR = -advantages_bR * ratio_bR.clamp(1 - clip_low, 1 + clip_high)
    metrics = {
        "ratio": ratio_bR.detach(),
        "clip_fraction": (clipped_bR > plain_bR).float(),
        "ppo_kl": -log_ratio_bR.detach(),
    }
    return PolicyLossOutput(torch.maximum(plain_bR, clipped_bR), metrics)


class PPO(PolicyLoss):
    r"""PPO-clip, arXiv 1707.06347, equation 7, as a loss to be minimised:

        ratio = pi(a_t) / pi_old(a_t)
        loss  = max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))

    The paper has one epsilon. ``clip_high > clip_low`` is the clip-higher of DAPO (arXiv 2503.14476, equation 10),
    which leaves unlikely tokens room to grow. ``dual_clip = c`` bounds the loss where A < 0 (arXiv 1912.09729,
    equation 5), because there ``max`` lets a huge ratio through:

        loss = min(loss, -A * c)                          where A < 0

    Left out: the value and entropy terms of equation 9, which the workers add, and the adaptive KL penalty of
    section 4.

    Metrics, per token: ``ratio``; ``clip_fraction``, 1 where the clipped term is the larger one and the token gives
    no gradient; ``clip_fraction_low``, 1 where the dual clip took over; ``ppo_kl``, the k1 estimate
    log pi_old - log pi of the distance moved since the batch was sampled.
    """

    config: PPOConfig

    def __call__(self, batch: PolicyLossInput) -> PolicyLossOutput:
        output = clipped_surrogate(batch, self.config.clip_low, self.config.clip_high)
        if self.config.dual_clip is None:
            return output
        bound_bR = -torch.where(batch.response_mask.bool(), batch.advantages, 0.0) * self.config.dual_clip
        capped_bR = (bound_bR > 0) & (output.losses > bound_bR)
        losses_bR = torch.where(capped_bR, bound_bR, output.losses)
        return replace(output, losses=losses_bR, metrics={**output.metrics, "clip_fraction_low": capped_bR.float()})
