"""What the entry point names."""

from agentrl_core.api import PluginSpec
from agentrl_tool_mcp.config import McpConfig

MCP = PluginSpec(
    kind="tool",
    name="mcp",
    api_version=1,
    summary="the functions of MCP servers, over stdio or HTTP",
    config=McpConfig,
    factory="agentrl_tool_mcp.tool:McpTool",
)
