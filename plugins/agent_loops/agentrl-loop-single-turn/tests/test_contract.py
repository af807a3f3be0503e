import pytest

from agentrl_loop_single_turn.plugin import PLUGIN
from agentrl_testing.contracts import AgentLoopCase, AgentLoopContract


class TestSingleTurn(AgentLoopContract):
    @pytest.fixture
    def plugin(self) -> AgentLoopCase:
        return AgentLoopCase(PLUGIN)
