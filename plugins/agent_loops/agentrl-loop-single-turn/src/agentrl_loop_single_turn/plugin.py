"""What the entry point names."""

from agentrl_core.api import PluginSpec

PLUGIN = PluginSpec(
    kind="agent_loop",
    name="single_turn",
    api_version=1,
    summary="one prompt, one answer; no tools",
    factory="agentrl_loop_single_turn.loop:SingleTurnLoop",
)
