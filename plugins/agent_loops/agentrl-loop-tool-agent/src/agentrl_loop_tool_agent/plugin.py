"""What the entry point names."""

from agentrl_core.api import PluginSpec
from agentrl_loop_tool_agent.config import ToolAgentConfig

PLUGIN = PluginSpec(
    kind="agent_loop",
    name="tool_agent",
    api_version=1,
    summary="many turns: parallel tool calls, answers from an interaction",
    config=ToolAgentConfig,
    factory="agentrl_loop_tool_agent.loop:ToolAgentLoop",
    capabilities=frozenset({"tools", "interactions"}),
)
