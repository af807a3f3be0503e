import pytest

from agentrl_core.api import RewardTrajectory
from agentrl_core.testing.contracts import (
    RewardFunctionCase,
    RewardFunctionContract,
    RewardManagerCase,
    RewardManagerContract,
)
from agentrl_rewards_basic.config import HashAnswerConfig, NaiveConfig
from agentrl_rewards_basic.plugin import EXACT_NUMBER, HASH_ANSWER, NAIVE


def answer(text: str) -> RewardTrajectory:
    return RewardTrajectory(messages=[], model_text=text, last_text=text, full_text=text, ground_truth="4")


class TestHashAnswer(RewardFunctionContract):
    @pytest.fixture
    def plugin(self) -> RewardFunctionCase:
        scored = [(answer("#### 4"), 1.0), (answer("#### 5"), 0.1), (answer("4"), 0.0)]
        return RewardFunctionCase(HASH_ANSWER, config=HashAnswerConfig(format_score=0.1), trajectories=scored)


class TestExactNumber(RewardFunctionContract):
    @pytest.fixture
    def plugin(self) -> RewardFunctionCase:
        return RewardFunctionCase(EXACT_NUMBER, trajectories=[(answer("4"), 1.0), (answer("5"), 0.0)])


class TestNaive(RewardManagerContract):
    @pytest.fixture
    def plugin(self) -> RewardManagerCase:
        return RewardManagerCase(NAIVE, config=NaiveConfig(tool_reward_weight=0.5, turn_score_weight=0.25))
