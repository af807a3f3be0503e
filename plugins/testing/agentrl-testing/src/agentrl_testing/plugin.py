"""What agentrl brings for trying things without a model."""

from agentrl_core.api.plugin import PluginSpec
from agentrl_testing.scripted_config import ScriptedConfig

SCRIPTED = PluginSpec(
    kind="engine",
    name="scripted",
    api_version=1,
    summary="answers by script, without a model: for tests and for trying a run's plumbing",
    config=ScriptedConfig,
    factory="agentrl_testing.scripted_engine:ScriptedEngine",
    capabilities=frozenset({"logprobs", "weight_update", "sessions", "images"}),
)
