"""What the entry point names."""

from agentrl_core.api import PluginSpec
from agentrl_loop_openai_agent.config import OpenAIAgentConfig

PLUGIN = PluginSpec(
    kind="agent_loop",
    name="openai_agent",
    api_version=1,
    summary="any async function that talks to an OpenAI-compatible endpoint",
    config=OpenAIAgentConfig,
    factory="agentrl_loop_openai_agent.loop:OpenAIAgentLoop",
    capabilities=frozenset({"chat_endpoint", "rewards"}),
)
