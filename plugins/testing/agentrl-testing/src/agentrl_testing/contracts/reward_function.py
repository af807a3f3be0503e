"""The contract of reward functions."""

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl_core.api import EngineClient, Engines, RewardFunctionContext, RewardResult, RewardTrajectory
from agentrl_testing.contracts.case import PluginCase, PluginContract, is_number, run

Scored = tuple[RewardTrajectory, float | None]


@dataclass(kw_only=True)
class RewardFunctionCase(PluginCase):
    """A reward function under test.

    Args:
        trajectories: some, each with the score that it must get, or None if any number will do.
        repeatable: the same trajectory always gets the same score.
        engines: stand-ins for the engines that the function asks, by name.
    """

    trajectories: Sequence[Scored]
    repeatable: bool = True
    engines: Mapping[str, EngineClient] = field(default_factory=dict)

    def make(self) -> Any:
        """A function as a reward worker builds it."""
        return self.build(RewardFunctionContext(self.spec.name, Engines(self.engines)))

    def score(self, function: Any, trajectory: RewardTrajectory) -> float:
        """Its score as a float; a test fails where it is none."""

        async def main() -> Any:
            value = function(trajectory)
            return await value if inspect.isawaitable(value) else value

        value = run(main())
        number = value.score if isinstance(value, RewardResult) else value
        assert is_number(number), f"the score is {number!r}, not a finite number"
        if isinstance(value, RewardResult):
            bad = {key: metric for key, metric in value.metrics.items() if not is_number(metric)}
            assert not bad, f"metrics that are not finite numbers: {bad}"
        return float(number)


class RewardFunctionContract(PluginContract):
    """What every reward function must do."""

    kind = "reward_function"

    def test_known_trajectories_get_their_scores(self, plugin: RewardFunctionCase) -> None:
        """Finite numbers, those that the author expects."""
        function = plugin.make()
        assert plugin.trajectories, "the case has no trajectories"
        for trajectory, expected in plugin.trajectories:
            score = plugin.score(function, trajectory)
            assert expected is None or abs(score - expected) < 1e-9, (
                f"{trajectory.model_text!r} scored {score}, expected {expected}"
            )

    def test_score_does_not_depend_on_what_was_scored_before(self, plugin: RewardFunctionCase) -> None:
        """Trajectories are scored in the order in which they end, which differs between runs."""
        if not plugin.repeatable:
            return
        function = plugin.make()
        forward = [plugin.score(function, trajectory) for trajectory, _ in plugin.trajectories]
        backward = [plugin.score(function, trajectory) for trajectory, _ in reversed(plugin.trajectories)]
        assert forward == backward[::-1], f"scores in one order {forward}, in the other {backward[::-1]}"

    def test_trajectory_is_left_alone(self, plugin: RewardFunctionCase) -> None:
        """The next reward function sees the same one."""
        function = plugin.make()
        for trajectory, _ in plugin.trajectories:
            before = copy.deepcopy(trajectory)
            plugin.score(function, trajectory)
            assert trajectory == before, "the function changed the trajectory"

    @settings(
        max_examples=50, deadline=None, derandomize=True, database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    )  # fmt: skip
    @given(text=st.text(max_size=100) | st.sampled_from(["", "nan", "inf", "1e999", "#### ", "\\boxed{", "٣", "١٢"]))
    def test_any_text_gets_a_finite_score(self, plugin: RewardFunctionCase, text: str) -> None:
        """A policy in training writes anything; none of it may score NaN or raise."""
        trajectory, _ = plugin.trajectories[0]
        strange = replace(trajectory, model_text=text, last_text=text, full_text=text)
        plugin.score(plugin.make(), strange)
