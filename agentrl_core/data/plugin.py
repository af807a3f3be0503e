"""The entry point of the default renderer; listing plugins imports it, so it imports nothing heavy."""

from agentrl_core.api import PluginSpec

CHAT_TEMPLATE = PluginSpec(
    kind="renderer",
    name="chat_template",
    api_version=1,
    summary="the model's chat template and rollout.tool_parser",
    factory="agentrl_core.data.chat_template:ChatTemplateRenderer",
    capabilities=frozenset({"tool_parser"}),
)
