import pytest

from acme_agentrl_extras.plugin import CLOSENESS, CONVERT, SECOND_THOUGHT
from agentrl_core.api import RewardTrajectory
from agentrl_core.testing.contracts import (
    AgentLoopCase,
    AgentLoopContract,
    RewardFunctionCase,
    RewardFunctionContract,
    ToolCase,
    ToolContract,
)


def answer(text: str) -> RewardTrajectory:
    return RewardTrajectory(messages=[], model_text=text, last_text=text, full_text=text, ground_truth="3000")


class TestSecondThought(AgentLoopContract):
    @pytest.fixture
    def plugin(self) -> AgentLoopCase:
        return AgentLoopCase(SECOND_THOUGHT, turns=["It is 4.", "It is 4, I am sure."])


class TestConvert(ToolContract):
    @pytest.fixture
    def plugin(self) -> ToolCase:
        return ToolCase(CONVERT, arguments={"value": 3, "source": "km", "target": "m"}, expected="3000")


class TestCloseness(RewardFunctionContract):
    @pytest.fixture
    def plugin(self) -> RewardFunctionCase:
        scored = [(answer("3000 m"), 1.0), (answer("So it is 3300."), 0.5), (answer("no idea"), 0.0)]
        return RewardFunctionCase(CLOSENESS, trajectories=scored)
