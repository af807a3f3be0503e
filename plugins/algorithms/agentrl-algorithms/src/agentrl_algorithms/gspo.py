"""Group sequence policy optimisation. Shapes: b rows of a micro-batch, R response tokens."""

import torch

from agentrl_algorithms.config import GSPOConfig
from agentrl_algorithms.ratio import bounded_exp, log_ratio, row_mean
from agentrl_core.api import PolicyLoss, PolicyLossInput, PolicyLossOutput


class GSPO(PolicyLoss):
    r"""GSPO-token, arXiv 2507.18071, equations 7, 13 and 14, as a loss to be minimised:

        s_i  = exp(1/|o_i| * sum_t log(pi(a_t) / pi_old(a_t)))
        s_it = sg[s_i] * pi(a_t) / sg[pi(a_t)]
        loss = max(-A_t * s_it, -A_t * clip(s_it, 1 - clip_low, 1 + clip_high))

    Value and gradient are those of GSPO itself (equation 5) where all tokens of a row have one advantage, as from
    ``grpo``; estimators that credit turns or tokens are allowed too. The paper averages over the tokens of a row and
    then over rows: ``algorithm.aggregation: seq-mean-token-mean``. A sequence is a row: the tokens that the policy
    sampled, without those of tools.

    Left out: nothing of the objective. The log-ratio is cut at +-20, which only a broken batch reaches.

    Metrics: ``ratio``, the sequence's; ``clip_fraction``, 1 where the clipped term is the larger one; ``ppo_kl``.
    """

    config: GSPOConfig

    def __call__(self, batch: PolicyLossInput) -> PolicyLossOutput:
        mask_bR = batch.response_mask.bool()
        log_ratio_bR = log_ratio(batch.log_probs, batch.old_log_probs, mask_bR)
        sequence_b1 = bounded_exp(row_mean(log_ratio_bR.detach(), mask_bR))
        ratio_bR = sequence_b1 * (log_ratio_bR - log_ratio_bR.detach()).exp()
        advantages_bR = torch.where(mask_bR, batch.advantages, 0.0)

        plain_bR = -advantages_bR * ratio_bR
        clipped_bR = -advantages_bR * ratio_bR.clamp(1 - self.config.clip_low, 1 + self.config.clip_high)
        metrics = {
            "ratio": ratio_bR.detach(),
            "clip_fraction": (clipped_bR > plain_bR).float(),
            "ppo_kl": -log_ratio_bR.detach(),
        }
        return PolicyLossOutput(torch.maximum(plain_bR, clipped_bR), metrics)
