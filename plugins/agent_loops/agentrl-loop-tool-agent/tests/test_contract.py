import pytest

from agentrl_loop_tool_agent.config import CompactingToolAgentConfig, MultiAgentConfig
from agentrl_loop_tool_agent.plugin import COMPACTING, MULTI_AGENT, PLUGIN
from agentrl_testing.contracts import AgentLoopCase, AgentLoopContract


class TestToolAgent(AgentLoopContract):
    @pytest.fixture
    def plugin(self) -> AgentLoopCase:
        return AgentLoopCase(PLUGIN)


class TestCompactingToolAgent(AgentLoopContract):
    """The answers to bad calls are summarised; those of the other conversations fit."""

    @pytest.fixture
    def plugin(self) -> AgentLoopCase:
        return AgentLoopCase(COMPACTING, config=CompactingToolAgentConfig(compact_below=1_900))


class TestMultiAgent(AgentLoopContract):
    @pytest.fixture
    def plugin(self) -> AgentLoopCase:
        return AgentLoopCase(MULTI_AGENT, config=MultiAgentConfig())
