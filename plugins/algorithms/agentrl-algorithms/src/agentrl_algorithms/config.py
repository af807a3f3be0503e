"""Options of the estimators and the loss."""

from dataclasses import dataclass

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
class TurnGAEConfig(GAEConfig):
    turn_gamma: float = option(1.0, ge=0, le=1, help="discount from a turn's last token to the next turn")
    turn_lam: float = option(1.0, ge=0, le=1, help="lambda from a turn's last token to the next turn")


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
