import numpy as np
import pytest
import torch

from acme_agentrl_extras.plugin import AGREEMENT, CLOSENESS, CONVERT, SECOND_THOUGHT, WEAKEST_PART
from agentrl_core.api import AdvantageInput, PolicyLossInput, RewardTrajectory
from agentrl_testing.contracts import (
    AdvantageEstimatorCase,
    AdvantageEstimatorContract,
    AgentLoopCase,
    AgentLoopContract,
    PolicyLossCase,
    PolicyLossContract,
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


class TestWeakestPart(AdvantageEstimatorContract):
    @pytest.fixture
    def plugin(self) -> AdvantageEstimatorCase:
        batch = AdvantageInput(
            torch.zeros(3, 2),
            torch.tensor([[True, True], [True, True], [True, False]]),
            np.array(["a", "a", "a"], object),
            np.array(["t0", "t1", "t2"], object),
            components={"right": torch.tensor([1.0, 1.0, torch.nan]), "short": torch.tensor([0.9, 0.1, torch.nan])},
        )
        expected = torch.tensor([[0.4, 0.4], [-0.4, -0.4], [0.0, 0.0]])
        return AdvantageEstimatorCase(WEAKEST_PART, known=[(batch, expected)])


class TestAgreement(PolicyLossContract):
    @pytest.fixture
    def plugin(self) -> PolicyLossCase:
        old, engine, ones = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, -1.1]]), torch.ones(1, 2)
        batch = PolicyLossInput(old, old, ones, ones.bool(), rollout_log_probs=engine)
        return PolicyLossCase(AGREEMENT, known=[(batch, torch.tensor([[1.0, 0.36787944]]))])
