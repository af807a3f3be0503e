"""What the entry points name."""

from agentrl_algorithms.config import GAEConfig, GRPOConfig, PPOConfig
from agentrl_core.api import PluginSpec

TORCH = ("torch>=2.11",)

GRPO = PluginSpec(
    kind="advantage_estimator",
    name="grpo",
    api_version=2,
    summary="reward relative to the other samples of the same prompt; no critic",
    factory="agentrl_algorithms.grpo:GRPO",
    config=GRPOConfig,
    requires=TORCH,
    capabilities=frozenset({"groups"}),
)

GAE = PluginSpec(
    kind="advantage_estimator",
    name="gae",
    api_version=2,
    summary="generalised advantage estimation per token, from a critic's values",
    factory="agentrl_algorithms.gae:GAE",
    config=GAEConfig,
    requires=TORCH,
    capabilities=frozenset({"values"}),
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
