"""The reward manager that adds up."""

import asyncio

from agentrl_core.api import RewardManager, RewardManagerContext, RewardResult, RewardTrajectory
from agentrl_rewards_basic.config import NaiveConfig

NOTHING = (
    "nothing gives a reward: reward.functions is empty, tool_reward_weight and turn_score_weight are 0; add a "
    "function, or set a weight in reward.manager.config"
)


class NaiveRewardManager(RewardManager):
    """sum_i weight_i function_i + tool_reward_weight sum(tool_rewards) + turn_score_weight sum(turn_scores).

    The rewards of tools and interactions belong to the turn that they answered. Components: the score of each function
    under its name, ``tool/<name>`` of each tool that returned rewards, and ``turn_scores``.

    Metrics: the score of each function under its name, its own metrics under ``<name>/<metric>``, and, where they are
    weighted, the sums ``tool_rewards`` and ``turn_scores``. The answer is that of the first function with one.
    A function that fails fails the trajectory's reward.
    """

    config: NaiveConfig

    def __init__(self, config: NaiveConfig, context: RewardManagerContext) -> None:
        super().__init__(config, context)
        self._gives_none = not (context.functions or config.tool_reward_weight or config.turn_score_weight)
        if self._gives_none and not context.loops_reward:
            raise ValueError(NOTHING)

    async def score(self, trajectory: RewardTrajectory) -> RewardResult:
        if self._gives_none:
            raise ValueError(f"the agent loop returned no reward, and {NOTHING}")
        functions = self.context.functions
        if len(functions) == 1:
            # Without a task: this runs for every trajectory.
            results = [await functions[0](trajectory)]
        else:
            results = await asyncio.gather(*(function(trajectory) for function in functions))
        score = 0.0
        metrics: dict[str, float] = {}
        components: dict[str, float] = {}
        by_turn: dict[int, float] = {}
        for function, result in zip(functions, results, strict=True):
            score += function.weight * result.score
            metrics[function.name] = components[function.name] = result.score
            for turn, reward in enumerate(result.turn_rewards):
                by_turn[turn] = by_turn.get(turn, 0.0) + function.weight * reward
            metrics |= {f"{function.name}/{key}": value for key, value in result.metrics.items()}
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
                    by_turn[turn] = by_turn.get(turn, 0.0) + weight * reward
        turn_rewards = [by_turn.get(turn, 0.0) for turn in range(max(by_turn, default=-1) + 1)]
        answers = [result.answer for result in results if result.answer is not None]
        return RewardResult(score, metrics, components, turn_rewards, answer=answers[0] if answers else None)
