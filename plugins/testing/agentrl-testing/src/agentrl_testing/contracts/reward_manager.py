"""The contract of reward managers."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from agentrl_core.api import RewardError, RewardManager, RewardManagerContext, RewardResult, RewardTrajectory
from agentrl_testing.contracts.case import PluginCase, PluginContract, is_number, needs, run


class LengthReward:
    """A bound function that scores the length of what the policy wrote."""

    def __init__(self, name: str, weight: float, fails: bool = False) -> None:
        self.name = name
        self.weight = weight
        self._fails = fails

    async def __call__(self, trajectory: RewardTrajectory) -> RewardResult:
        if self._fails:
            raise RewardError(f"{self.name} cannot score this")
        return RewardResult(len(trajectory.model_text) / 10, {"length": float(len(trajectory.model_text))})


def trajectory(text: str = "four", **fields: Any) -> RewardTrajectory:
    """A short one."""
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": text}]
    counted: dict[str, Any] = {"num_turns": 2, "sampled_tokens": len(text)}
    return RewardTrajectory(messages, text, text, text, ground_truth="4", **counted | fields)


@dataclass(kw_only=True)
class RewardManagerCase(PluginCase):
    """A reward manager under test."""

    def make(self, functions: Sequence[Any] | None = None) -> RewardManager:
        """A manager over these functions, or over two that score the length."""
        bound = [LengthReward("first", 1.0), LengthReward("second", 0.5)] if functions is None else functions
        manager: RewardManager = self.build(RewardManagerContext(bound))
        return manager


class RewardManagerContract(PluginContract):
    """What every reward manager must do."""

    kind = "reward_manager"

    def test_score_is_a_result(self, plugin: RewardManagerCase) -> None:
        """A finite score with finite metrics, the same for the same trajectory."""
        manager = plugin.make()
        result, again = run(manager.score(trajectory())), run(manager.score(trajectory()))
        assert isinstance(result, RewardResult), f"score returned a {type(result).__name__}, not a RewardResult"
        assert is_number(result.score), f"the score is {result.score!r}, not a finite number"
        bad = {key: value for key, value in result.metrics.items() if not is_number(value)}
        assert not bad, f"metrics that are not finite numbers: {bad}"
        assert result.score == again.score, f"the same trajectory scored {result.score} and {again.score}"

    def test_functions_reach_the_score(self, plugin: RewardManagerCase) -> None:
        """A configured function that changes nothing would be a silent loss."""
        manager = plugin.make()
        short, long = run(manager.score(trajectory("four"))), run(manager.score(trajectory("four" * 10)))
        assert short.score != long.score, "the configured reward functions have no influence on the score"

    def test_failure_of_a_function_is_not_a_zero(self, plugin: RewardManagerCase) -> None:
        """It passes through, so that the trajectory is excluded."""
        manager = plugin.make([LengthReward("good", 1.0), LengthReward("bad", 1.0, fails=True)])
        with pytest.raises(RewardError):
            run(manager.score(trajectory()))

    def test_trajectory_is_left_alone(self, plugin: RewardManagerCase) -> None:
        """Records and hooks see it afterwards."""
        scored = trajectory(tool_rewards=[1.0], turn_scores=[0.5])
        before = copy.deepcopy(scored)
        run(plugin.make().score(scored))
        assert scored == before, "the manager changed the trajectory"

    @pytest.mark.parametrize("capability", ["tool_rewards", "turn_scores"])
    def test_collected_rewards_count_as_declared(self, plugin: RewardManagerCase, capability: str) -> None:
        """With the capability they change the score; without it they do not."""
        manager = plugin.make()
        collected: dict[str, Any] = {capability: [1.0]}
        without, with_one = trajectory(), trajectory(**collected)
        changed = run(manager.score(without)).score != run(manager.score(with_one)).score
        if plugin.has(capability):
            assert changed, f"the capability {capability!r} is declared, but {capability} have no influence"
        else:
            assert not changed, f"{capability} change the score: declare the capability {capability!r}"

    def test_group_is_revised_row_by_row(self, plugin: RewardManagerCase) -> None:
        """As many results as samples, and their order follows the samples'."""
        needs(plugin, "group")
        manager = plugin.make()
        samples = [trajectory("x" * length) for length in (1, 5, 9, 3)]

        async def revised(order: Sequence[int]) -> list[float]:
            chosen = [samples[index] for index in order]
            results = [await manager.score(sample) for sample in chosen]
            revised = await manager.score_group(chosen, results)
            assert len(revised) == len(chosen), f"{len(revised)} results for {len(chosen)} samples"
            assert all(is_number(result.score) for result in revised), "a revised score is not a finite number"
            return [float(result.score) for result in revised]

        forward, backward = run(revised([0, 1, 2, 3])), run(revised([3, 2, 1, 0]))
        assert forward == pytest.approx(backward[::-1]), "the scores depend on the order of the samples"
