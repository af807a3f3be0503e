"""What the entry points name."""

from agentrl_core.api import PluginSpec
from agentrl_rewards_basic.config import HashAnswerConfig, NaiveConfig

NAIVE = PluginSpec(
    kind="reward_manager",
    name="naive",
    api_version=1,
    summary="weighted sum of functions, tool rewards and turn scores",
    config=NaiveConfig,
    factory="agentrl_rewards_basic.manager:NaiveRewardManager",
    capabilities=frozenset({"tool_rewards", "turn_scores"}),
)

HASH_ANSWER = PluginSpec(
    kind="reward_function",
    name="hash_answer",
    api_version=1,
    summary="1 if the last '#### x' of the last turn is the ground truth",
    config=HashAnswerConfig,
    factory="agentrl_rewards_basic.functions:HashAnswer",
)

EXACT_NUMBER = PluginSpec(
    kind="reward_function",
    name="exact_number",
    api_version=1,
    summary="1 if the last number of the last turn is the ground truth",
    factory="agentrl_rewards_basic.functions:ExactNumber",
)
