"""What the entry point names."""

from agentrl_core.api import PluginSpec
from agentrl_env_textarena.config import TextArenaConfig

ENVIRONMENT = PluginSpec(
    kind="environment",
    name="textarena",
    api_version=1,
    summary="a weighted mixture of textarena's games for one or two players, with their rewards; self-play",
    config=TextArenaConfig,
    factory="agentrl_env_textarena.environment:TextArena",
    requires=("textarena>=0.7.4",),
)
