import pytest

from agentrl_testing.contracts import ToolCase, ToolContract
from agentrl_tool_mcp.config import McpConfig, ServerConfig
from agentrl_tool_mcp.plugin import MCP


class TestMcp(ToolContract):
    @pytest.fixture
    def plugin(self, notes: ServerConfig) -> ToolCase:
        config = McpConfig({"notes": notes})
        return ToolCase(MCP, config=config, function="add", arguments={"text": "milk"}, expected="1 notes")
