"""What the entry points name."""

from acme_agentrl_extras.config import AgreementConfig, ClosenessConfig, ConvertConfig, SecondThoughtConfig
from agentrl_core.api import PluginSpec

SECOND_THOUGHT = PluginSpec(
    kind="agent_loop",
    name="acme_second_thought",
    api_version=1,
    summary="tools, and one question whether the answer is sure",
    config=SecondThoughtConfig,
    factory="acme_agentrl_extras.loop:SecondThoughtLoop",
    capabilities=frozenset({"tools"}),
)

CONVERT = PluginSpec(
    kind="tool",
    name="acme_convert",
    api_version=1,
    summary="converts lengths",
    config=ConvertConfig,
    factory="acme_agentrl_extras.tool:Convert",
)

CLOSENESS = PluginSpec(
    kind="reward_function",
    name="acme_closeness",
    api_version=1,
    summary="how close the last number is to the ground truth",
    config=ClosenessConfig,
    factory="acme_agentrl_extras.reward:Closeness",
)

WEAKEST_PART = PluginSpec(
    kind="advantage_estimator",
    name="acme_weakest_part",
    api_version=2,
    summary="the smallest part of the score, relative to the other samples of the prompt",
    factory="acme_agentrl_extras.estimator:WeakestPart",
    requires=("torch>=2.11",),
    capabilities=frozenset({"groups", "components"}),
)

AGREEMENT = PluginSpec(
    kind="policy_loss",
    name="acme_agreement",
    api_version=2,
    summary="policy gradient with less weight on tokens where engine and trainer disagree",
    config=AgreementConfig,
    factory="acme_agentrl_extras.loss:Agreement",
    requires=("torch>=2.11",),
    capabilities=frozenset({"rollout_log_probs"}),
)
