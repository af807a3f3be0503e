"""What the entry point names."""

from agentrl_core.api import PluginSpec
from agentrl_rewards_judge.config import JudgeConfig, RewardModelConfig

JUDGE = PluginSpec(
    kind="reward_function",
    name="judge",
    api_version=1,
    summary="the verdict of a model of `engines`: a number, yes or no, or what a regular expression finds",
    config=JudgeConfig,
    factory="agentrl_rewards_judge.judge:Judge",
)
REWARD_MODEL = PluginSpec(
    kind="reward_function",
    name="reward_model",
    api_version=1,
    summary="the score of a transformers model for sequence classification, of the conversation or of each turn",
    config=RewardModelConfig,
    factory="agentrl_rewards_judge.reward_model:RewardModel",
    requires=("torch>=2.11", "transformers>=5"),
)
