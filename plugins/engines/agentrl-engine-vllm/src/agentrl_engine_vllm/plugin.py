"""The entry point of the vLLM engine."""

from agentrl_core.api.plugin import PluginSpec
from agentrl_engine_vllm.config import VLLMConfig

PLUGIN = PluginSpec(
    kind="engine",
    name="vllm",
    api_version=1,
    summary="vLLM's AsyncLLM, in its own environment (rollout.engine.python)",
    factory="agentrl_engine_vllm.engine:make_engine",
    config=VLLMConfig,
    requires=("vllm>=0.32",),
    capabilities=frozenset(
        {
            "logprobs",
            "seeds",
            "min_p",
            "chained_truncation",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "logit_bias",
            "json_schema",
            "abort",
            "pause",
            "sleep",
            "weight_update",
            "live_update",
            "old_cache",
            "broadcast",
            "ipc",
            "parallel",
            "multi_node",
            "adapters",
            "images",
            "routed_experts",
        }
    ),
)
