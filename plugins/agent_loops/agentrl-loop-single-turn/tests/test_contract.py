import pytest

from agentrl_core.testing.contracts import AgentLoopCase, AgentLoopContract
from agentrl_loop_single_turn.plugin import PLUGIN


class TestSingleTurn(AgentLoopContract):
    @pytest.fixture
    def plugin(self) -> AgentLoopCase:
        return AgentLoopCase(PLUGIN)
