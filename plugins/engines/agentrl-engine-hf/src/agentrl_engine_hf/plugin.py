"""The entry point of the embedded engine."""

from agentrl_core.api.plugin import PluginSpec
from agentrl_engine_hf.config import HFEngineConfig

PLUGIN = PluginSpec(
    kind="engine",
    name="hf",
    api_version=1,
    summary="embedded: continuous batching over a transformers model, on CPU or GPU",
    factory="agentrl_engine_hf.engine:HFEngine",
    config=HFEngineConfig,
    requires=("torch>=2.11", "transformers>=5.16"),
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
            "abort",
            "pause",
            "sleep",
            "weight_update",
            "live_update",
            "old_cache",
            "broadcast",
            "ipc",
            "shared_module",
            "deterministic",
            "sessions",
            "adapters",
            "images",
            "routed_experts",
        }
    ),
)
