"""What the entry point names."""

from agentrl_core.api import PluginSpec
from agentrl_rewards_judge.config import JudgeConfig

JUDGE = PluginSpec(
    kind="reward_function",
    name="judge",
    api_version=1,
    summary="the verdict of a model of `engines`: a number, yes or no, or what a regular expression finds",
    config=JudgeConfig,
    factory="agentrl_rewards_judge.judge:Judge",
)
