"""Masked importance sampling. Shapes: B rows, R response tokens."""

from agentrl_algorithms.config import IcePopConfig, ImportanceConfig
from agentrl_algorithms.off_policy import corrected, log_ratios
from agentrl_algorithms.ratio import bounded_exp
from agentrl_core.api import CorrectionInput, CorrectionOutput, RolloutCorrection


class TokenMIS(RolloutCorrection):
    r"""Importance weights of tokens that reject what truncation would cut, Liu, Li et al. 2025, "When Speed Kills
    Stability: Demystifying RL Collapse from the Training-Inference Mismatch":

        rho_t = pi_old(a_t) / mu(a_t)
        w_t   = rho_t * [rho_t <= max_weight]

    A ratio that large is more often an error of one of the two policies than information.
    """

    config: ImportanceConfig

    def __call__(self, batch: CorrectionInput) -> CorrectionOutput:
        ratios_BR = bounded_exp(log_ratios(batch))
        return corrected(batch, ratios_BR * (ratios_BR <= self.config.max_weight), self.config.normalize)


class SequenceMIS(RolloutCorrection):
    r"""The same with one weight per row: w_i = rho_i * [rho_i <= max_weight] with rho_i = prod_t rho_t."""

    config: ImportanceConfig

    def __call__(self, batch: CorrectionInput) -> CorrectionOutput:
        ratios_B1 = bounded_exp(log_ratios(batch).sum(-1, keepdim=True))
        return corrected(batch, ratios_B1 * (ratios_B1 <= self.config.max_weight), self.config.normalize)


class IcePop(RolloutCorrection):
    r"""IcePop, arXiv 2510.18855 (Ring-1T): token weights that reject on both sides,

        w_t = rho_t * [low <= rho_t <= high]

    A token that the trainer's policy finds far less likely than the engine's is rejected as well.
    """

    config: IcePopConfig

    def __call__(self, batch: CorrectionInput) -> CorrectionOutput:
        ratios_BR = bounded_exp(log_ratios(batch))
        kept_BR = (ratios_BR >= self.config.low) & (ratios_BR <= self.config.high)
        return corrected(batch, ratios_BR * kept_BR, self.config.normalize)


class SequenceIcePop(RolloutCorrection):
    r"""The same with one weight per row: w_i = rho_i * [low <= rho_i <= high] with rho_i = prod_t rho_t."""

    config: IcePopConfig

    def __call__(self, batch: CorrectionInput) -> CorrectionOutput:
        ratios_B1 = bounded_exp(log_ratios(batch).sum(-1, keepdim=True))
        kept_B1 = (ratios_B1 >= self.config.low) & (ratios_B1 <= self.config.high)
        return corrected(batch, ratios_B1 * kept_B1, self.config.normalize)
