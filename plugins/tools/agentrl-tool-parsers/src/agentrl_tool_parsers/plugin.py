"""What the entry points name."""

from agentrl_core.api import PluginSpec
from agentrl_tool_parsers.config import HermesConfig

HERMES = PluginSpec(
    kind="tool_parser",
    name="hermes",
    api_version=1,
    summary="<tool_call>{json}</tool_call>: Hermes, Qwen 2.5 and Qwen 3",
    config=HermesConfig,
    factory="agentrl_tool_parsers.hermes:HermesParser",
)
