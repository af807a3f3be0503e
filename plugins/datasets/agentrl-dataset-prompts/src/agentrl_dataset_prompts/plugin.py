"""What the entry point names."""

from agentrl_core.api import PluginSpec
from agentrl_dataset_prompts.config import PromptsConfig

PROMPTS = PluginSpec(
    kind="dataset",
    name="prompts",
    api_version=1,
    summary="parquet or JSON lines with chat prompts, ground truth and per-row tool arguments",
    config=PromptsConfig,
    factory="agentrl_dataset_prompts.prompts:PromptsFromFiles",
    requires=("datasets>=4.0",),
)
