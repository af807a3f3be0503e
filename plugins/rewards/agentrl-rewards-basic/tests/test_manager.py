import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from agentrl_core.api import RewardError, RewardManagerContext, RewardResult, RewardTrajectory
from agentrl_rewards_basic.config import NaiveConfig
from agentrl_rewards_basic.manager import NaiveRewardManager


class Constant:
    """A bound reward function that always gives one score."""

    def __init__(
        self, name: str, score: float, weight: float = 1.0, metrics: Mapping[str, float] | None = None
    ) -> None:
        self.name, self.weight = name, weight
        self.result = RewardResult(score, metrics or {})

    async def __call__(self, trajectory: RewardTrajectory) -> RewardResult:
        return self.result


def score(*functions: Any, config: NaiveConfig | None = None, **fields: Any) -> RewardResult:
    manager = NaiveRewardManager(config or NaiveConfig(), RewardManagerContext(functions))
    return asyncio.run(manager.score(RewardTrajectory([], "", "", "", **fields)))


def test_weighted_sum_with_the_metrics_of_each_function() -> None:
    result = score(Constant("right", 1.0, 2.0, {"digits": 4.0}), Constant("brief", 0.5, -1.0))
    assert (result.score, result.metrics) == (1.5, {"right": 1.0, "right/digits": 4.0, "brief": 0.5})
    assert result.components == {"right": 1.0, "brief": 0.5}


def test_tool_rewards_and_turn_scores_reach_the_reward() -> None:
    config = NaiveConfig(tool_reward_weight=0.5, turn_score_weight=10.0)
    result = score(Constant("right", 1.0), config=config, tool_rewards=[1.0, 2.0], turn_scores=[0.0, 1.0])
    assert result.score == 1.0 + 1.5 + 10.0
    assert result.metrics == {"right": 1.0, "tool_rewards": 3.0, "turn_scores": 1.0}


def test_a_tools_reward_belongs_to_the_turn_that_called_it_and_carries_its_name() -> None:
    result = score(
        Constant("right", 1.0), config=NaiveConfig(tool_reward_weight=0.5, turn_score_weight=10.0),
        tool_rewards=[1.0, 2.0, 4.0], tool_reward_names=["search", "code", "search"], tool_reward_turns=[0, 0, 2],
        turn_scores=[0.25], turn_score_turns=[1],
    )  # fmt: skip
    assert result.turn_rewards == [1.5, 2.5, 2.0] and result.score == 1.0 + 6.0
    assert result.components == {"right": 1.0, "tool/search": 5.0, "tool/code": 2.0, "turn_scores": 0.25}


def test_tool_rewards_and_turn_scores_are_left_out_by_default() -> None:
    result = score(Constant("right", 1.0), tool_rewards=[5.0], turn_scores=[5.0])
    assert (result.score, result.metrics, result.turn_rewards) == (1.0, {"right": 1.0}, [])


def test_no_rewards_from_tools_is_zero() -> None:
    result = score(config=NaiveConfig(tool_reward_weight=1.0))
    assert (result.score, result.metrics) == (0.0, {"tool_rewards": 0.0})


def test_failing_function_fails_the_reward() -> None:
    class Failing(Constant):
        async def __call__(self, trajectory: RewardTrajectory) -> RewardResult:
            raise RewardError("nan")

    with pytest.raises(RewardError, match="nan"):
        score(Constant("right", 1.0), Failing("broken", 0.0))


def test_manager_that_could_give_no_reward_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing gives a reward"):
        NaiveRewardManager(NaiveConfig(), RewardManagerContext([]))


def test_an_agent_that_returns_its_rewards_needs_no_reward_function() -> None:
    manager = NaiveRewardManager(NaiveConfig(), RewardManagerContext([], loops_reward=True))
    with pytest.raises(ValueError, match="the agent loop returned no reward, and nothing gives a reward"):
        asyncio.run(manager.score(RewardTrajectory([], "", "", "")))
