"""The entry point of the SGLang engine."""

from agentrl_core.api.plugin import PluginSpec
from agentrl_engine_sglang.config import SGLangConfig

PLUGIN = PluginSpec(
    kind="engine",
    name="sglang",
    api_version=1,
    summary="an SGLang server process, in its own environment (rollout.engine.python)",
    factory="agentrl_engine_sglang.engine:SGLangEngine",
    config=SGLangConfig,
    requires=("aiohttp>=3.10", "sglang>=0.5.21"),
    # No penalties: SGLang applies them one token late with its overlapping scheduler, and its repetition penalty counts
    # what was sampled, but not the prompt. No json_schema: a server with a tokenizer, which grammars need, ends every
    # request at the tokenizer's end of sequence. No chained_truncation: SGLang takes the share of top_p of the whole
    # distribution. No old_cache: SGLang pauses in place with the results of a step still unread, and takes their tokens
    # for those of the new weights.
    capabilities=frozenset(
        {
            "logprobs",
            "min_p",
            "logit_bias",
            "abort",
            "pause",
            "sleep",
            "weight_update",
            "live_update",
            "broadcast",
            "parallel",
            "multi_node",
            "adapters",
            "images",
            "routed_experts",
        }
    ),
)
