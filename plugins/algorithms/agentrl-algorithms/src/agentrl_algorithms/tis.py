"""Truncated importance sampling. Shapes: B rows, R response tokens."""

from agentrl_algorithms.config import ImportanceConfig
from agentrl_algorithms.off_policy import corrected, log_ratios
from agentrl_algorithms.ratio import bounded_exp
from agentrl_core.api import CorrectionInput, CorrectionOutput, RolloutCorrection


class TokenTIS(RolloutCorrection):
    r"""Truncated weights of tokens, as in decoupled PPO (Hilton et al., arXiv 2110.00641) with the bound of
    IMPALA (arXiv 1802.01561) and of Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training":

        rho_t = pi_old(a_t) / mu(a_t)
        w_t   = min(rho_t, max_weight)

    Left out: the ratios of the tokens before, without which the gradient of a sequence is biased.
    """

    config: ImportanceConfig

    def __call__(self, batch: CorrectionInput) -> CorrectionOutput:
        weights_BR = bounded_exp(log_ratios(batch)).clamp(max=self.config.max_weight)
        return corrected(batch, weights_BR, self.config.normalize)


class SequenceTIS(RolloutCorrection):
    r"""One truncated weight per row, Liu, Li et al. 2025, "When Speed Kills Stability: Demystifying RL Collapse from
    the Training-Inference Mismatch":

        w_i = min(prod_t rho_t, max_weight)          the same for every token of the row

    Without the bound the gradient is unbiased; its variance grows with the length. A sequence is a row: where a
    trajectory has several rows, each has a separate weight.
    """

    config: ImportanceConfig

    def __call__(self, batch: CorrectionInput) -> CorrectionOutput:
        weights_B1 = bounded_exp(log_ratios(batch).sum(-1, keepdim=True)).clamp(max=self.config.max_weight)
        return corrected(batch, weights_B1, self.config.normalize)
