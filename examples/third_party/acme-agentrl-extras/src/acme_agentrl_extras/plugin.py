"""What the entry points name."""

from acme_agentrl_extras.config import ClosenessConfig, ConvertConfig, SecondThoughtConfig
from agentrl_core.api import PluginSpec

SECOND_THOUGHT = PluginSpec(
    kind="agent_loop",
    name="acme_second_thought",
    api_version=1,
    summary="tools, and one question whether the answer is sure",
    config=SecondThoughtConfig,
    factory="acme_agentrl_extras.loop:SecondThoughtLoop",
    capabilities=frozenset({"tools"}),
)

CONVERT = PluginSpec(
    kind="tool",
    name="acme_convert",
    api_version=1,
    summary="converts lengths",
    config=ConvertConfig,
    factory="acme_agentrl_extras.tool:Convert",
)

CLOSENESS = PluginSpec(
    kind="reward_function",
    name="acme_closeness",
    api_version=1,
    summary="how close the last number is to the ground truth",
    config=ClosenessConfig,
    factory="acme_agentrl_extras.reward:Closeness",
)
