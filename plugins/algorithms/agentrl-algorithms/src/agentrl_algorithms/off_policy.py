"""How far the policy that is updated is from the one that sampled; what all rollout corrections share.

mu is the engine's policy, pi the one before this step's updates, rho = pi(a_t) / mu(a_t). Shapes: B rows, R response
tokens. Everything is computed in float64 over tokens with mask 1; exponents are cut at +-20, beyond which log-probs do
not belong together.
"""

import torch
from torch import Tensor

from agentrl_algorithms.ratio import bounded_exp, log_ratio, row_mean
from agentrl_core.api import CorrectionInput, CorrectionOutput


def log_ratios(batch: CorrectionInput) -> Tensor:
    """log rho [B, R] float64, 0 under mask 0."""
    return log_ratio(batch.old_log_probs.double(), batch.rollout_log_probs.double(), batch.response_mask.bool())


def corrected(batch: CorrectionInput, weights: Tensor, normalize: bool = False) -> CorrectionOutput:
    """The output for weights of tokens [B, R] or of rows [B, 1], with all metrics.

    ``normalize`` divides them by their mean over sampled tokens, or over rows that have any.
    """
    mask_BR = batch.response_mask.bool()
    counted = mask_BR if weights.shape == mask_BR.shape else mask_BR.any(-1, keepdim=True)
    total = float(weights[counted].sum())
    if normalize and total > 0:
        weights = weights * (int(counted.sum()) / total)
    weights_BR = torch.where(mask_BR, weights, 0.0)
    return CorrectionOutput(weights_BR.float(), {**distance(batch), **usage(weights_BR, mask_BR)})


def distance(batch: CorrectionInput) -> dict[str, float]:
    """Metrics of the two policies, whatever the correction does about them.

    kl            mean(-log rho)                 KL(mu || pi), the k1 estimate
    k3_kl         mean(rho - 1 - log rho)        the same with less variance, never negative
    chi2_token    mean(rho^2) - 1                variance of the tokens' weights
    chi2_seq      mean_i((prod_t rho)^2) - 1     variance of the rows' weights
    rollout_ppl   mean_i(exp(-mean_t log mu))    perplexity of the engine's policy
    training_ppl  mean_i(exp(-mean_t log pi))    perplexity of the policy that is updated
    """
    mask_BR = batch.response_mask.bool()
    rows_B = mask_BR.any(-1)
    if not rows_B.any():
        return dict.fromkeys(("kl", "k3_kl", "chi2_token", "chi2_seq", "rollout_ppl", "training_ppl"), 0.0)
    log_rho_BR = log_ratios(batch)
    log_rho_N = log_rho_BR[mask_BR]
    rollout_ppl_B1, training_ppl_B1 = (
        bounded_exp(-row_mean(log_probs_BR.double(), mask_BR))
        for log_probs_BR in (batch.rollout_log_probs, batch.old_log_probs)
    )
    values = {
        "kl": -log_rho_N.mean(),
        "k3_kl": (bounded_exp(log_rho_N) - 1 - log_rho_N).mean(),
        "chi2_token": bounded_exp(2 * log_rho_N).mean() - 1,
        "chi2_seq": bounded_exp(2 * log_rho_BR.sum(-1)[rows_B]).mean() - 1,
        "rollout_ppl": rollout_ppl_B1[rows_B].mean(),
        "training_ppl": training_ppl_B1[rows_B].mean(),
    }
    return {name: float(value) for name, value in values.items()}


def usage(weights_BR: Tensor, mask_BR: Tensor) -> dict[str, float]:
    """Metrics of the weights.

    weight_mean     mean(w)
    ess             mean(w)^2 / mean(w^2)     effective sample size, as a share of the sampled tokens
    rejected_share  share of sampled tokens with weight 0
    """
    weights_N = weights_BR[mask_BR]
    if not weights_N.numel():
        return {"weight_mean": 0.0, "ess": 0.0, "rejected_share": 0.0}
    mean, square = float(weights_N.mean()), float(weights_N.square().mean())
    rejected = float((weights_N == 0).double().mean())
    return {"weight_mean": mean, "ess": mean**2 / square if square else 0.0, "rejected_share": rejected}
