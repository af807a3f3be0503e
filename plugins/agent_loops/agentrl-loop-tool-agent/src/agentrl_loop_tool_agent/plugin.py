"""What the entry points name."""

from agentrl_core.api import PluginSpec
from agentrl_loop_tool_agent.config import CompactingToolAgentConfig, MultiAgentConfig, ToolAgentConfig

PLUGIN = PluginSpec(
    kind="agent_loop",
    name="tool_agent",
    api_version=1,
    summary="many turns: parallel tool calls, answers from an interaction",
    config=ToolAgentConfig,
    factory="agentrl_loop_tool_agent.loop:ToolAgentLoop",
    capabilities=frozenset({"tools", "interactions"}),
)

COMPACTING = PluginSpec(
    kind="agent_loop",
    name="compacting_tool_agent",
    api_version=1,
    summary="the tool agent; summarises a context that is nearly full and goes on in a new row",
    config=CompactingToolAgentConfig,
    factory="agentrl_loop_tool_agent.compacting:CompactingToolAgentLoop",
    capabilities=frozenset({"tools", "interactions"}),
)

MULTI_AGENT = PluginSpec(
    kind="agent_loop",
    name="multi_agent",
    api_version=1,
    summary="the tool agent for several agents and self-play; each has its own conversation and reward",
    config=MultiAgentConfig,
    factory="agentrl_loop_tool_agent.multi_agent:MultiAgentLoop",
    capabilities=frozenset({"tools", "interactions"}),
)
