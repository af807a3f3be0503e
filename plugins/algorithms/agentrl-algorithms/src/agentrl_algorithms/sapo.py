"""Soft adaptive policy optimisation. Shapes: b rows of a micro-batch, R response tokens."""

import torch

from agentrl_algorithms.config import SAPOConfig
from agentrl_algorithms.ratio import bounded_exp, log_ratio
from agentrl_core.api import PolicyLoss, PolicyLossInput, PolicyLossOutput


class SAPO(PolicyLoss):
    r"""SAPO, arXiv 2511.20347, as a loss to be minimised:

        ratio = pi(a_t) / pi_old(a_t)
        f     = sigmoid(tau * (ratio - 1)) * 4 / tau
        loss  = -A * f                                  tau is tau_positive where A > 0, else tau_negative

    The sigmoid replaces the clip: the gradient's weight, 4 p (1 - p) ratio with p = sigmoid(tau * (ratio - 1)), is 1 on
    policy and fades smoothly on both sides, faster the larger tau is. The paper averages over the tokens of a row and
    then over rows: ``algorithm.aggregation: seq-mean-token-mean``.

    Left out: nothing of the objective.

    Metrics: ``ratio``; ``gate``, 4 p (1 - p), 1 on policy and 0 where a token gives no gradient; ``ppo_kl``.
    """

    config: SAPOConfig

    def __call__(self, batch: PolicyLossInput) -> PolicyLossOutput:
        mask_bR = batch.response_mask.bool()
        log_ratio_bR = log_ratio(batch.log_probs, batch.old_log_probs, mask_bR)
        ratio_bR = bounded_exp(log_ratio_bR)
        advantages_bR = torch.where(mask_bR, batch.advantages, 0.0)
        tau_bR = torch.where(advantages_bR > 0, self.config.tau_positive, self.config.tau_negative)
        gate_bR = torch.sigmoid(tau_bR * (ratio_bR - 1))
        slope_bR = (4 * gate_bR * (1 - gate_bR)).detach()
        metrics = {"ratio": ratio_bR.detach(), "gate": slope_bR, "ppo_kl": -log_ratio_bR.detach()}
        return PolicyLossOutput(-advantages_bR * gate_bR * 4 / tau_bR, metrics)
