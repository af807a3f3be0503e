"""The dataset that agentrl brings."""

from agentrl_core.api.plugin import PluginSpec
from agentrl_core.data.config import PromptsConfig

PROMPTS = PluginSpec(
    kind="dataset",
    name="prompts",
    api_version=1,
    summary="parquet or JSON lines with chat prompts, ground truth and per-row tool arguments",
    config=PromptsConfig,
    factory="agentrl_core.data.prompts:PromptsFromFiles",
    requires=("datasets>=4.0",),
)
