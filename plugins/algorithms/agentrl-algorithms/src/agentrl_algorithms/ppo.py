"""The clipped surrogate objective.

Shapes: b rows of a micro-batch, R response tokens.
"""

import torch

from agentrl_algorithms.config import PPOConfig
from agentrl_core.api import PolicyLoss, PolicyLossInput, PolicyLossOutput

MAX_LOG_RATIO = 20.0
"""Beyond it the ratio (4.9e8) says only that old_log_probs do not belong to this batch; exp must not overflow."""


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
        mask_bR = batch.response_mask.bool()
        # Fillers under mask 0 (0.0 or NaN from an engine) must reach neither exp nor its gradient.
        log_ratio_bR = torch.where(mask_bR, batch.log_probs - batch.old_log_probs, 0.0)
        ratio_bR = log_ratio_bR.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        advantages_bR = torch.where(mask_bR, batch.advantages, 0.0)

        plain_bR = -advantages_bR * ratio_bR
        clipped_bR = -advantages_bR * ratio_bR.clamp(1 - self.config.clip_low, 1 + self.config.clip_high)
        losses_bR = torch.maximum(plain_bR, clipped_bR)
        metrics = {
            "ratio": ratio_bR.detach(),
            "clip_fraction": (clipped_bR > plain_bR).float(),
            "ppo_kl": -log_ratio_bR.detach(),
        }
        if self.config.dual_clip is not None:
            bound_bR = -advantages_bR * self.config.dual_clip
            capped_bR = (advantages_bR < 0) & (losses_bR > bound_bR)
            losses_bR = torch.where(capped_bR, bound_bR, losses_bR)
            metrics["clip_fraction_low"] = capped_bR.float()
        return PolicyLossOutput(losses_bR, metrics)
