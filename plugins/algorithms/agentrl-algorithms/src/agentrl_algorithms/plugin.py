"""What the entry points name."""

from agentrl_algorithms.config import (
    GAEConfig,
    GDPOConfig,
    GRPOConfig,
    OnPolicyDistillationConfig,
    PPOConfig,
    TurnGAEConfig,
)
from agentrl_core.api import NoConfig, PluginSpec

TORCH = ("torch>=2.11",)


def _estimator(name: str, factory: str, summary: str, *capabilities: str, config: type = NoConfig) -> PluginSpec:
    return PluginSpec(
        kind="advantage_estimator",
        name=name,
        api_version=2,
        summary=summary,
        factory=f"agentrl_algorithms.{factory}",
        config=config,
        requires=TORCH,
        capabilities=frozenset(capabilities),
    )


GRPO = _estimator(
    "grpo",
    "grpo:GRPO",
    "reward relative to the other samples of the same prompt; no critic",
    "groups",
    config=GRPOConfig,
)
GAE = _estimator(
    "gae", "gae:GAE", "generalised advantage estimation per token, from a critic's values", "values", config=GAEConfig
)
TURN_GAE = _estimator(
    "turn_gae",
    "turn_gae:TurnGAE",
    "GAE with a discount and lambda within turns, and others from turn to turn",
    "values",
    config=TurnGAEConfig,
)
RLOO = _estimator("rloo", "rloo:RLOO", "score minus the mean of the prompt's other samples; unbiased", "groups")
TURN_RLOO = _estimator(
    "turn_rloo",
    "turn_rloo:TurnRLOO",
    "credit per turn: what is earned from a turn on, minus that of the prompt's other samples",
    "groups",
)
REINFORCE_PLUS_PLUS = _estimator(
    "reinforce_plus_plus",
    "reinforce_plus_plus:ReinforcePlusPlus",
    "score normalised over the whole batch; one sample per prompt is enough",
)
REINFORCE_PLUS_PLUS_BASELINE = _estimator(
    "reinforce_plus_plus_baseline",
    "reinforce_plus_plus:ReinforcePlusPlusBaseline",
    "score minus its group's mean, normalised over the whole batch",
    "groups",
)
REMAX = _estimator("remax", "remax:ReMax", "score minus that of a greedy answer to the prompt", "greedy_baseline")
OPO = _estimator("opo", "opo:OPO", "score minus the length-weighted mean of its group", "groups")
GPG = _estimator("gpg", "gpg:GPG", "score minus its group's mean, scaled up for groups without signal", "groups")
GDPO = _estimator(
    "gdpo",
    "gdpo:GDPO",
    "normalises each component of the score in its group before it adds them up",
    "groups",
    "components",
    config=GDPOConfig,
)
GRPO_PASSK = _estimator(
    "grpo_passk", "grpo_passk:GRPOPassK", "pass@k: only the best sample of a group counts, with its lead", "groups"
)
MAXRL = _estimator("maxrl", "maxrl:MaxRL", "maximum likelihood: centred scores over the group's success rate", "groups")
OPTIMAL_TOKEN_BASELINE = _estimator(
    "optimal_token_baseline",
    "optimal_token_baseline:OptimalTokenBaseline",
    "a group baseline per token, weighted by squared score norms",
    "groups",
    "entropies",
)
OPTIMAL_TURN_BASELINE = _estimator(
    "optimal_turn_baseline",
    "optimal_token_baseline:OptimalTurnBaseline",
    "a group baseline per turn, weighted by squared score norms",
    "groups",
    "entropies",
)
ON_POLICY_DISTILLATION = _estimator(
    "on_policy_distillation",
    "on_policy_distillation:OnPolicyDistillation",
    "reverse KL to a teacher per token, optionally with a group-relative score",
    "teacher_log_probs",
    config=OnPolicyDistillationConfig,
)

PPO = PluginSpec(
    kind="policy_loss",
    name="ppo",
    api_version=2,
    summary="clipped surrogate with asymmetric and dual clip",
    factory="agentrl_algorithms.ppo:PPO",
    config=PPOConfig,
    requires=TORCH,
)
