"""Rejection of rows or tokens. Shapes: B rows, R response tokens, N sampled tokens."""

import math
from typing import Any

import torch
from torch import Tensor

from agentrl_algorithms.config import DivergenceConfig, GeometricConfig, PercentileConfig
from agentrl_algorithms.off_policy import corrected, log_ratios
from agentrl_algorithms.ratio import MAX_LOG_RATIO, bounded_exp, row_mean
from agentrl_core.api import AlgorithmContext, ConfigError, CorrectionInput, CorrectionOutput, RolloutCorrection

_LEVELS = {"k1": ("token", "seq_sum", "seq_mean"), "k2": ("token", "seq_sum", "seq_mean", "seq_max"),
           "k3": ("token", "seq_sum", "seq_mean", "seq_max")}  # fmt: skip
STATISTICS = tuple(f"{level}_{estimate}" for estimate, levels in _LEVELS.items() for level in levels)


class GeometricRejection(RolloutCorrection):
    r"""Rejects rows by the geometric mean of their ratios, Liu, Li et al. 2025, "When Speed Kills Stability:
    Demystifying RL Collapse from the Training-Inference Mismatch", part 3:

        g_i = (prod_t rho_t)^(1/|o_i|)
        w_t = [low <= g_i <= high]                               without max_weight
        w_t = [low <= g_i <= high] * min(rho_t, max_weight)      with it: also the truncated weights of ``token_tis``

    Unlike the product, the mean does not depend on the length. It is close to 1 where engine and trainer agree, so the
    bounds are tight: 0.999 allows a mean difference of 0.001 nats per token.
    """

    config: GeometricConfig

    def __call__(self, batch: CorrectionInput) -> CorrectionOutput:
        log_ratios_BR = log_ratios(batch)
        means_B1 = bounded_exp(row_mean(log_ratios_BR, batch.response_mask.bool()))
        kept_B1 = ((means_B1 >= self.config.low) & (means_B1 <= self.config.high)).double()
        if self.config.max_weight is None:
            return corrected(batch, kept_B1)
        return corrected(batch, kept_B1 * bounded_exp(log_ratios_BR).clamp(max=self.config.max_weight))


class DivergenceRejection(RolloutCorrection):
    r"""Rejects tokens or rows whose divergence is beyond a limit; with several limits, what exceeds any of them.

    The estimates are those of Schulman, "Approximating KL Divergence", for tokens that mu sampled (KL(mu || pi)); the
    rejection of rows is that of Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from the
    Training-Inference Mismatch", part 3:

        k1 = log rho        k2 = (log rho)^2 / 2        k3 = rho - 1 - log rho
        d  = k_t  (token)   sum_t k_t  (seq_sum)        mean_t k_t  (seq_mean)       max_t k_t  (seq_max)
        w_t = prod over limits of [d <= high], for k1 of [log low <= d <= log high], times the weight

    ``seq_mean_k1`` is ``geometric_rejection``. Log-ratios of tokens are cut to +-20.
    """

    config: DivergenceConfig

    def __init__(self, config: Any, context: AlgorithmContext) -> None:
        super().__init__(config, context)
        if not self.config.limits:
            raise ConfigError(f"divergence_rejection.limits: name at least one of {', '.join(STATISTICS)}")
        for name, bounds in self.config.limits.items():
            where = f"divergence_rejection.limits.{name}"
            if name not in STATISTICS:
                raise ConfigError(f"{where}: unknown; allowed: {', '.join(STATISTICS)}")
            if name.endswith("k1") and not (len(bounds) == 2 and 0 < bounds[0] <= 1 <= bounds[1] < math.inf):
                raise ConfigError(f"{where}: found {bounds}; write [smallest ratio, largest ratio], such as [0.5, 2.0]")
            if not name.endswith("k1") and not (len(bounds) == 1 and 0 < bounds[0] < math.inf):
                raise ConfigError(f"{where}: found {bounds}; write the largest divergence as [0.1]")

    def __call__(self, batch: CorrectionInput) -> CorrectionOutput:
        mask_BR, log_rho_BR = batch.response_mask.bool(), log_ratios(batch).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        kept_BR = torch.ones_like(mask_BR)
        for name, bounds in self.config.limits.items():
            value = _statistic(name, log_rho_BR, mask_BR)
            low, high = map(math.log, bounds) if name.endswith("k1") else (-math.inf, bounds[0])
            kept_BR = kept_BR & (value >= low) & (value <= high)
        weights_BR = kept_BR.double()
        if self.config.weights != "none":
            by_row = self.config.weights == "sequence"
            log_weights = log_ratios(batch).sum(-1, keepdim=True) if by_row else log_rho_BR
            weights_BR = weights_BR * bounded_exp(log_weights).clamp(max=self.config.max_weight)
        return corrected(batch, weights_BR)


def _statistic(name: str, log_rho_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """Of tokens [B, R] or of rows [B, 1]; 0 where nothing was sampled."""
    level, _, estimate = name.rpartition("_")
    values_BR = log_rho_BR
    if estimate == "k2":
        values_BR = log_rho_BR.square() / 2
    elif estimate == "k3":
        values_BR = log_rho_BR.exp() - 1 - log_rho_BR
    if level == "seq_sum":
        return torch.where(mask_BR, values_BR, 0.0).sum(-1, keepdim=True)
    if level == "seq_mean":
        return row_mean(values_BR, mask_BR)
    # k2 and k3 are never negative: the places under mask 0, where log rho is 0, change no maximum.
    return values_BR.amax(-1, keepdim=True) if level == "seq_max" else values_BR


class PercentileRejection(RolloutCorrection):
    r"""Rejects the tokens of a step whose probabilities differ most:

        w_t = [|log rho_t| <= q]          q: the smallest value that ``keep`` of the step's tokens do not exceed

    No paper. The bound adapts to the engine's precision, where a fixed one rejects nothing or nearly everything. Tokens
    that differ as much as the last one that is kept are kept too.
    """

    config: PercentileConfig

    def __call__(self, batch: CorrectionInput) -> CorrectionOutput:
        differences_BR = log_ratios(batch).abs()
        sampled_N = differences_BR[batch.response_mask.bool()]
        if not sampled_N.numel():
            return corrected(batch, differences_BR)
        # torch.quantile takes at most 2**24 elements.
        bound = sampled_N.kthvalue(max(math.ceil(self.config.keep * sampled_N.numel()), 1)).values
        return corrected(batch, (differences_BR <= bound).double())
