"""Options of the estimators, losses and corrections."""

from dataclasses import dataclass
from typing import Literal

from agentrl_core.api import option


@dataclass
class GRPOConfig:
    norm_by_std: bool = option(True, help="divide by the group's standard deviation; false: Dr. GRPO")
    eps: float = option(1e-6, gt=0, help="added to the standard deviation")


@dataclass
class GAEConfig:
    gamma: float = option(1.0, ge=0, le=1, help="discount per sampled token")
    lam: float = option(1.0, ge=0, le=1, help="0: one-step advantages; 1: the whole return")
    whiten: bool = option(True, help="advantages of a batch get mean 0 and variance 1 over its sampled tokens")


@dataclass
class ReinforcePlusPlusConfig:
    gamma: float = option(1.0, ge=0, le=1, help="discount per sampled token; below 1 tokens are normalised")


@dataclass
class TurnGAEConfig(GAEConfig):
    turn_gamma: float = option(1.0, ge=0, le=1, help="discount from a turn's last token to the next turn")
    turn_lam: float = option(1.0, ge=0, le=1, help="lambda from a turn's last token to the next turn")


@dataclass
class TurnRLOOConfig:
    turn_gamma: float = option(1.0, ge=0, le=1, help="discount from a turn to the next; 0: a turn's own reward alone")


@dataclass
class GDPOConfig:
    weights: dict[str, float] = option(
        default_factory=dict, help="weight of each component after its normalisation, by name; 1 for those left out"
    )


@dataclass
class OnPolicyDistillationConfig:
    reward_coef: float = option(
        0.0, ge=0, help="weight of the group-relative score (grpo) that is added; 0: only the teacher counts"
    )


@dataclass
class PPOConfig:
    clip_low: float = option(0.2, gt=0, lt=1, help="the ratio counts down to 1 - clip_low")
    clip_high: float = option(
        0.2, gt=0, help="the ratio counts up to 1 + clip_high; above clip_low: DAPO's clip-higher"
    )
    dual_clip: float | None = option(
        None, gt=1, help="bound of ratio where the advantage is negative, e.g. 3; null: none"
    )


@dataclass
class GSPOConfig:
    clip_low: float = option(3e-4, gt=0, lt=1, help="the sequence's ratio counts down to 1 - clip_low")
    clip_high: float = option(4e-4, gt=0, help="the sequence's ratio counts up to 1 + clip_high")


@dataclass
class CISPOConfig:
    clip_low: float = option(1.0, gt=0, le=1, help="smallest weight is 1 - clip_low; 1: no lower bound")
    clip_high: float = option(4.0, gt=0, help="largest weight is 1 + clip_high")


@dataclass
class GMPOConfig:
    clip_low: float = option(0.4, gt=0, help="a token's log-ratio counts down to -clip_low")
    clip_high: float = option(0.4, gt=0, help="a token's log-ratio counts up to clip_high")


@dataclass
class SAPOConfig:
    tau_positive: float = option(1.0, gt=0, help="steepness of the gate where the advantage is positive")
    tau_negative: float = option(1.05, gt=0, help="steepness of the gate elsewhere; larger: the gradient fades faster")


@dataclass
class DPPOConfig:
    divergence: Literal["tv", "kl"] = option("tv", help="total variation, or Kullback-Leibler")
    threshold: float | None = option(None, gt=0, help="largest divergence of a token; null: 0.15 for tv, 0.05 for kl")
    max_ratio: float = option(20.0, gt=0, help="largest importance weight")


@dataclass
class ClipCovConfig:
    clip_low: float = option(0.2, gt=0, lt=1, help="the ratio counts down to 1 - clip_low")
    clip_high: float = option(0.2, gt=0, help="the ratio counts up to 1 + clip_high")
    share: float = option(2e-4, gt=0, le=1, help="share of a mini-batch's tokens that lose their gradient")
    cov_low: float = option(1.0, help="smallest covariance of such a token")
    cov_high: float = option(5.0, help="largest covariance of such a token")


@dataclass
class KLCovConfig:
    share: float = option(2e-4, gt=0, le=1, help="share of a mini-batch's tokens that get the KL penalty")
    kl_coef: float = option(1.0, ge=0, help="weight of the penalty")


@dataclass
class DROConfig:
    tau: float = option(1.0, gt=0, help="strength of the KL regularisation; smaller: the reward counts more")


@dataclass
class TISReinforceConfig:
    max_ratio: float = option(2.0, gt=0, help="largest importance weight")


@dataclass
class SFTConfig:
    tokens: Literal["all", "positive"] = option("all", help="which tokens count: all, or those with advantage > 0")
    weight: float = option(1.0, gt=0, help="factor of the loss, against the KL and entropy terms")


@dataclass
class ImportanceConfig:
    max_weight: float = option(2.0, gt=0, help="largest weight; a larger one is cut (tis) or becomes 0 (mis)")
    normalize: bool = option(False, help="divide the weights by their mean over the step")


@dataclass
class IcePopConfig:
    low: float = option(0.5, ge=0, le=1, help="smaller ratios get weight 0")
    high: float = option(5.0, ge=1, help="larger ratios get weight 0")
    normalize: bool = option(False, help="divide the weights by their mean over the step")


@dataclass
class GeometricConfig:
    low: float = option(0.999, gt=0, le=1, help="rows with a smaller geometric mean of ratios are rejected")
    high: float = option(1.001, ge=1, help="rows with a larger geometric mean of ratios are rejected")
    max_weight: float | None = option(
        None, gt=0, help="largest importance weight of the tokens of a row that is kept; null: no weights"
    )


@dataclass
class DivergenceConfig:
    limits: dict[str, list[float]] = option(
        default_factory=lambda: {"seq_mean_k3": [0.01]},
        help="what a kept token or row fulfils, all of them: {token_k3: [0.5], seq_mean_k1: [0.999, 1.001]}. Names are "
        "token, seq_sum, seq_mean or seq_max with _k2 or _k3 and the largest value, or token, seq_sum or seq_mean with "
        "_k1 and the smallest and largest ratio",
    )
    weights: Literal["none", "token", "sequence"] = option(
        "none", help="importance weights of what is kept: none, those of token_tis or those of sequence_tis"
    )
    max_weight: float = option(2.0, gt=0, help="largest importance weight")


@dataclass
class PercentileConfig:
    keep: float = option(0.99, gt=0, le=1, help="share of a step's tokens that are kept")
