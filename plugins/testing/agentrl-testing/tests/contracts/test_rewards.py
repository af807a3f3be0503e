import math

from agentrl_core.api import RewardError, RewardManager, RewardResult, RewardTrajectory
from agentrl_testing.contracts import (
    RewardFunctionCase,
    RewardFunctionContract,
    RewardManagerCase,
    RewardManagerContract,
)


def trajectory(text):
    return RewardTrajectory([], text, text, text, ground_truth="4", extra_info={"seen": 0})


SCORED = [(trajectory("4"), 1.0), (trajectory("5"), 0.0)]


def constant(config, context):
    return lambda trajectory: 0.5


def nan(config, context):
    return lambda trajectory: math.nan


def counting(config, context):
    calls = iter(range(1000))
    return lambda trajectory: float(next(calls))


def writing(config, context):
    def score(trajectory):
        trajectory.extra_info["seen"] += 1
        return 1.0

    return score


def parsing(config, context):
    return lambda trajectory: float(trajectory.last_text)


def test_every_check_catches_a_broken_reward_function(spec, catches) -> None:
    def case(factory):
        return RewardFunctionCase(spec("reward_function", factory), trajectories=SCORED)

    catches(
        RewardFunctionContract,
        {
            "test_known_trajectories_get_their_scores": [case(constant), case(nan)],
            "test_score_does_not_depend_on_what_was_scored_before": [case(counting)],
            "test_trajectory_is_left_alone": [case(writing)],
            "test_any_text_gets_a_finite_score": [case(parsing), case(nan)],
        },
    )


class Sum(RewardManager):
    async def score(self, trajectory):
        return RewardResult(sum([(await function(trajectory)).score for function in self.context.functions], 0.0))


class Zero(RewardManager):
    async def score(self, trajectory):
        return RewardResult(0.0)


class Number(RewardManager):
    async def score(self, trajectory):
        return 1.0


class Forgiving(RewardManager):
    async def score(self, trajectory):
        total = 0.0
        for function in self.context.functions:
            try:
                total += (await function(trajectory)).score
            except RewardError:
                pass
        return RewardResult(total)


class Writing(Sum):
    async def score(self, trajectory):
        trajectory.tool_rewards.clear()
        return RewardResult(1.0)


class Secret(Sum):
    """Uses tool rewards without saying so."""

    async def score(self, trajectory):
        return RewardResult(sum(trajectory.tool_rewards, 0.0))


class ByPosition(Sum):
    async def score_group(self, trajectories, results):
        return [RewardResult(result.score + index) for index, result in enumerate(results)]


class Drops(Sum):
    async def score_group(self, trajectories, results):
        return results[1:]


def test_every_check_catches_a_broken_reward_manager(spec, catches) -> None:
    def case(cls, *capabilities):
        return RewardManagerCase(spec("reward_manager", cls, *capabilities))

    catches(
        RewardManagerContract,
        {
            "test_score_is_a_result": [case(Number)],
            "test_functions_reach_the_score": [case(Zero)],
            "test_failure_of_a_function_is_not_a_zero": [case(Forgiving)],
            "test_trajectory_is_left_alone": [case(Writing)],
            "test_collected_rewards_count_as_declared": [case(Secret), case(Sum, "tool_rewards", "turn_scores")],
            "test_group_is_revised_row_by_row": [case(ByPosition, "group"), case(Drops, "group")],
        },
    )
