"""The entry point of the Megatron training backend."""

from agentrl_backend_megatron.config import MegatronConfig
from agentrl_core.api.plugin import PluginSpec

PLUGIN = PluginSpec(
    kind="training_backend",
    name="megatron",
    api_version=1,
    summary="Megatron-Core: tensor, pipeline, expert and context parallelism, in its own environment",
    factory="agentrl_backend_megatron.backend:Megatron",
    config=MegatronConfig,
    requires=("megatron-core>=0.16,<0.17",),
    capabilities=frozenset({"all_weights", "entropies", "temperature", "ranks"}),
)
