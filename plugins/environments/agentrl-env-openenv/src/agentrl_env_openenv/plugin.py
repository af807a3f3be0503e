"""What the entry point names."""

from agentrl_core.api import PluginSpec
from agentrl_env_openenv.config import OpenEnvConfig

ENVIRONMENT = PluginSpec(
    kind="environment",
    name="openenv",
    api_version=1,
    summary="an OpenEnv environment, in the worker or at a URL: its actions as tools or as plain text, its rewards",
    config=OpenEnvConfig,
    factory="agentrl_env_openenv.environment:OpenEnv",
)
