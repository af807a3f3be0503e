"""What the entry points name."""

from agentrl_core.api import PluginSpec
from agentrl_env_reasoning_gym.config import LevelsConfig, ReasoningGymConfig

ENVIRONMENT = PluginSpec(
    kind="environment",
    name="reasoning_gym",
    api_version=1,
    summary="a weighted mixture of reasoning-gym's data sets, with its scorers and curricula",
    config=ReasoningGymConfig,
    factory="agentrl_env_reasoning_gym.environment:ReasoningGym",
    requires=("reasoning-gym>=0.1.25",),
)

LEVELS = PluginSpec(
    kind="sampler",
    name="levels",
    api_version=1,
    summary="rows of each data_source by rising extra_info.level, once their rewards are high enough",
    config=LevelsConfig,
    factory="agentrl_env_reasoning_gym.levels:Levels",
)
