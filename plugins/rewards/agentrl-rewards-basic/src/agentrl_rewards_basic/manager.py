"""The reward manager that adds up."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import ClassVar

from agentrl_core.api import (
    BoundRewardFunction,
    RewardManager,
    RewardManagerContext,
    RewardResult,
    RewardTrajectory,
    together,
)
from agentrl_rewards_basic.config import NaiveConfig

NOTHING = (
    "nothing gives a reward: reward.functions is empty, tool_reward_weight and turn_score_weight are 0; add a "
    "function, or set a weight in reward.manager.config"
)


class NaiveRewardManager(RewardManager):
    """sum_i weight_i function_i + tool_reward_weight sum(tool_rewards) + turn_score_weight sum(turn_scores).

    Where the score of a function in ``gates`` is 0 or less, the reward is 0 instead, the rewards of turns and tokens
    included; components and metrics stay.

    The rewards of tools and interactions belong to the turn that they answered. Components: the score of each function
    under its name, its own components under ``<name>/<component>``, ``tool/<name>`` of each tool that returned rewards,
    and ``turn_scores``.

    Metrics: the score of each function under its name, its own metrics under ``<name>/<metric>``, where they are
    weighted, the sums ``tool_rewards`` and ``turn_scores``, and, with gates, ``gated``: 1 where one was closed. The
    answer is that of the first function with one. A function that fails fails the trajectory's reward.

    Subclasses override ``functions_of`` (which functions count) and ``call`` (how one is called).
    """

    config: NaiveConfig
    needs_a_source: ClassVar[bool] = True
    """False: a subclass gives rewards that are neither from functions nor from tools or interactions."""

    def __init__(self, config: NaiveConfig, context: RewardManagerContext) -> None:
        super().__init__(config, context)
        given = context.functions or config.tool_reward_weight or config.turn_score_weight
        self._gives_none = self.needs_a_source and not given
        if self._gives_none and not context.loops_reward:
            raise ValueError(NOTHING)
        self.check_names("gates", config.gates)

    async def score(self, trajectory: RewardTrajectory) -> RewardResult:
        if self._gives_none:
            raise ValueError(f"the agent loop returned no reward, and {NOTHING}")
        functions = self.functions_of(trajectory)
        if len(functions) == 1:
            # Without a task: this runs for every trajectory.
            results = [await self.call(functions[0], trajectory)]
        else:
            results = await together(self.call(function, trajectory) for function in functions)
        score = 0.0
        metrics: dict[str, float] = {}
        components: dict[str, float] = {}
        by_turn: dict[int, float] = defaultdict(float)
        by_token: dict[int, float] = defaultdict(float)
        for function, result in zip(functions, results, strict=True):
            score += function.weight * result.score
            metrics[function.name] = components[function.name] = result.score
            metrics |= {f"{function.name}/{key}": value for key, value in result.metrics.items()}
            components |= {f"{function.name}/{key}": value for key, value in result.components.items()}
            for turn, reward in enumerate(result.turn_rewards):
                by_turn[turn] += function.weight * reward
            for token, reward in enumerate(result.token_rewards):
                by_token[token] += function.weight * reward
        for name, reward in zip(trajectory.tool_reward_names, trajectory.tool_rewards, strict=False):
            components[f"tool/{name}"] = components.get(f"tool/{name}", 0.0) + reward
        if trajectory.turn_scores:
            components["turn_scores"] = float(sum(trajectory.turn_scores))
        for name, weight, rewards, turns in (
            ("tool_rewards", self.config.tool_reward_weight, trajectory.tool_rewards, trajectory.tool_reward_turns),
            ("turn_scores", self.config.turn_score_weight, trajectory.turn_scores, trajectory.turn_score_turns),
        ):
            if weight:
                metrics[name] = float(sum(rewards))
                score += weight * metrics[name]
                for turn, reward in zip(turns, rewards, strict=False):
                    by_turn[turn] += weight * reward
        if self.config.gates:
            closed = any(components.get(name, 1.0) <= 0 for name in self.config.gates)
            metrics["gated"] = float(closed)
            if closed:
                score, by_turn, by_token = 0.0, {}, {}
        turn_rewards, token_rewards = (
            [rewards.get(index, 0.0) for index in range(max(rewards, default=-1) + 1)]
            for rewards in (by_turn, by_token)
        )
        answer = next((result.answer for result in results if result.answer is not None), None)
        return RewardResult(score, metrics, components, turn_rewards, token_rewards, answer)

    def functions_of(self, trajectory: RewardTrajectory) -> Sequence[BoundRewardFunction]:
        """The functions that count for a trajectory."""
        return self.context.functions

    async def call(self, function: BoundRewardFunction, trajectory: RewardTrajectory) -> RewardResult:
        """The result of one function."""
        return await function(trajectory)

    def check_names(self, option: str, names: Iterable[str]) -> None:
        """Raises ValueError where an option names a function that is not configured."""
        known = [function.name for function in self.context.functions]
        for name in names:
            if name not in known:
                raise ValueError(
                    f"reward.manager.config.{option}: no function {name!r} in reward.functions, which has "
                    f"{', '.join(known) or 'none'}; add or rename it"
                )
