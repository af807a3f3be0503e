"""What the entry points name."""

from agentrl_core.api import NoConfig, PluginSpec
from agentrl_env_openenv.config import OpenEnvConfig

ENVIRONMENT = PluginSpec(
    kind="environment",
    name="openenv",
    api_version=1,
    summary="an OpenEnv environment, in the worker or at a URL: its actions as tools or as plain text, its rewards",
    config=OpenEnvConfig,
    factory="agentrl_env_openenv.environment:OpenEnv",
)

TRAINING_TRACE = PluginSpec(
    kind="agent_loop",
    name="training_trace",
    api_version=1,
    summary="plays the tokens of OpenEnv's TrainingTrace files, for SFT and off-policy training",
    config=NoConfig,
    factory="agentrl_env_openenv.loop:TrainingTraceLoop",
    capabilities=frozenset({"tools", "rewards"}),
)
