"""The entry point of the default training backend; listing plugins imports it, so it imports nothing heavy."""

from agentrl_core.api.plugin import KINDS, PluginSpec
from agentrl_core.fsdp2.config import Fsdp2Config

FSDP2 = PluginSpec(
    kind="training_backend",
    name="fsdp2",
    api_version=1,
    summary="models of transformers, sharded over ranks by torch",
    factory="agentrl_core.fsdp2.backend:Fsdp2",
    config=Fsdp2Config,
    capabilities=frozenset(KINDS["training_backend"].capabilities.keys() - {"remote_weights"}),
)
