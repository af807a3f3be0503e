from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import RewardTrajectory
from agentrl_rewards_judge.config import JudgeConfig, RewardModelConfig
from agentrl_rewards_judge.plugin import JUDGE, REWARD_MODEL
from agentrl_testing.contracts import RewardFunctionCase, RewardFunctionContract


class Counts:
    """A judge that counts the letters of the answer."""

    async def chat(self, messages: Any, **sampling: Any) -> str:
        return f"score: {len(messages[0]['content'])}"


class TestJudge(RewardFunctionContract):
    @pytest.fixture
    def plugin(self) -> RewardFunctionCase:
        trajectories = [(RewardTrajectory([], text, text, text), float(len(text))) for text in ("four", "4")]
        config = JudgeConfig(engine="judge", template="{answer}", score=r"score: (\d+)")
        return RewardFunctionCase(JUDGE, config=config, trajectories=trajectories, engines={"judge": Counts()})


class TestRewardModel(RewardFunctionContract):
    @pytest.fixture
    def plugin(self, reward_model: Path) -> RewardFunctionCase:
        trajectories = [
            (RewardTrajectory([{"role": "assistant", "content": text}], text, text, text), None)
            for text in ("four", "4")
        ]
        config = RewardModelConfig(model=str(reward_model))
        return RewardFunctionCase(REWARD_MODEL, config=config, trajectories=trajectories)
