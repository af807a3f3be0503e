"""What the entry points name."""

from agentrl_core.api import NoConfig, PluginSpec
from agentrl_rewards_basic.config import (
    BatchConfig,
    BySourceConfig,
    DapoConfig,
    ExactMatchConfig,
    FuzzyMatchConfig,
    HashAnswerConfig,
    JsonSchemaConfig,
    LengthPenaltyConfig,
    NaiveConfig,
    RateLimitedConfig,
    RemoteConfig,
    RepetitionPenaltyConfig,
    TagsConfig,
)


def _manager(name: str, summary: str, config: type, factory: str, *capabilities: str) -> PluginSpec:
    return PluginSpec(
        kind="reward_manager",
        name=name,
        api_version=1,
        summary=summary,
        config=config,
        factory=f"agentrl_rewards_basic.{factory}",
        capabilities=frozenset({"tool_rewards", "turn_scores", *capabilities}),
    )


def _function(name: str, summary: str, config: type, factory: str) -> PluginSpec:
    return PluginSpec(
        kind="reward_function",
        name=name,
        api_version=1,
        summary=summary,
        config=config,
        factory=f"agentrl_rewards_basic.{factory}",
    )


NAIVE = _manager(
    "naive", "weighted sum of functions, tool rewards and turn scores", NaiveConfig, "manager:NaiveRewardManager"
)
BY_SOURCE = _manager(
    "by_source", "naive, with other functions for each data_source", BySourceConfig, "variants:BySourceRewardManager"
)
DAPO = _manager("dapo", "naive, plus DAPO's penalty of overlong answers", DapoConfig, "variants:DapoRewardManager")
RATE_LIMITED = _manager(
    "rate_limited",
    "naive, with limits on the calls of functions",
    RateLimitedConfig,
    "variants:RateLimitedRewardManager",
)
BATCH = _manager(
    "batch",
    "naive, plus a function that scores all samples of a prompt",
    BatchConfig,
    "variants:BatchRewardManager",
    "group",
)

HASH_ANSWER = _function(
    "hash_answer",
    "1 if the last '#### x' of the last turn is the ground truth",
    HashAnswerConfig,
    "functions:HashAnswer",
)
EXACT_NUMBER = _function(
    "exact_number", "1 if the last number of the last turn is the ground truth", NoConfig, "functions:ExactNumber"
)
EXACT_MATCH = _function(
    "exact_match", "1 if the answer is the ground truth as normalised text", ExactMatchConfig, "text:ExactMatch"
)
FUZZY_MATCH = _function(
    "fuzzy_match", "similarity of the answer and the ground truth as text", FuzzyMatchConfig, "text:FuzzyMatch"
)
JSON_SCHEMA = _function(
    "json_schema", "1 if the answer is JSON that a schema accepts", JsonSchemaConfig, "form:JsonSchema"
)
TAGS = _function(
    "tags", "1 if the last turn is <think>…</think><answer>…</answer>, or other tags", TagsConfig, "form:Tags"
)
LENGTH_PENALTY = _function(
    "length_penalty", "0 to -1 for answers near and above a length (DAPO)", LengthPenaltyConfig, "length:LengthPenalty"
)
REPETITION_PENALTY = _function(
    "repetition_penalty", "0 to -1 for repeated n-grams", RepetitionPenaltyConfig, "length:RepetitionPenalty"
)
REMOTE = _function("remote", "the score that a server returns for the trajectory", RemoteConfig, "remote:Remote")
