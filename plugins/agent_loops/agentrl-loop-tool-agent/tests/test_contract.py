import pytest

from agentrl_core.testing.contracts import AgentLoopCase, AgentLoopContract
from agentrl_loop_tool_agent.plugin import PLUGIN


class TestToolAgent(AgentLoopContract):
    @pytest.fixture
    def plugin(self) -> AgentLoopCase:
        return AgentLoopCase(PLUGIN)
