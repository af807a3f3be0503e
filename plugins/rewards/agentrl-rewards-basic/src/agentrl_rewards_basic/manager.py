"""The reward manager that adds up."""

import asyncio

from agentrl_core.api import RewardManager, RewardManagerContext, RewardResult, RewardTrajectory
from agentrl_rewards_basic.config import NaiveConfig


class NaiveRewardManager(RewardManager):
    """sum_i weight_i function_i + tool_reward_weight sum(tool_rewards) + turn_score_weight sum(turn_scores).

    Metrics: the score of each function under its name, its own metrics under ``<name>/<metric>``, and, where they are
    weighted, the sums ``tool_rewards`` and ``turn_scores``. The answer is that of the first function with one.
    A function that fails fails the trajectory's reward.
    """

    config: NaiveConfig

    def __init__(self, config: NaiveConfig, context: RewardManagerContext) -> None:
        super().__init__(config, context)
        if not context.functions and not config.tool_reward_weight and not config.turn_score_weight:
            raise ValueError(
                "nothing gives a reward: reward.functions is empty, tool_reward_weight and turn_score_weight are 0; "
                "add a function, or set a weight in reward.manager.config"
            )

    async def score(self, trajectory: RewardTrajectory) -> RewardResult:
        functions = self.context.functions
        if len(functions) == 1:
            # No task of its own: this runs for every trajectory.
            results = [await functions[0](trajectory)]
        else:
            results = await asyncio.gather(*(function(trajectory) for function in functions))
        score = 0.0
        metrics: dict[str, float] = {}
        for function, result in zip(functions, results, strict=True):
            score += function.weight * result.score
            metrics[function.name] = result.score
            metrics |= {f"{function.name}/{key}": value for key, value in result.metrics.items()}
        for name, weight, rewards in (
            ("tool_rewards", self.config.tool_reward_weight, trajectory.tool_rewards),
            ("turn_scores", self.config.turn_score_weight, trajectory.turn_scores),
        ):
            if weight:
                metrics[name] = float(sum(rewards))
                score += weight * metrics[name]
        answers = [result.answer for result in results if result.answer is not None]
        return RewardResult(score, metrics, answers[0] if answers else None)
