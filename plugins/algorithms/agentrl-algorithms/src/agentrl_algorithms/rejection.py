"""Rejection of rows or tokens. Shapes: B rows, R response tokens, N sampled tokens."""

import math

from agentrl_algorithms.config import GeometricConfig, PercentileConfig
from agentrl_algorithms.off_policy import corrected, log_ratios
from agentrl_algorithms.ratio import bounded_exp, row_mean
from agentrl_core.api import CorrectionInput, CorrectionOutput, RolloutCorrection


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
