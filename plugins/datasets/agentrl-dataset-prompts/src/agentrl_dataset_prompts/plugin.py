"""What the entry points name."""

from agentrl_core.api import PluginSpec
from agentrl_dataset_prompts.config import CurriculumConfig, MixtureConfig, PromptsConfig

PROMPTS = PluginSpec(
    kind="dataset",
    name="prompts",
    api_version=1,
    summary="parquet or JSON lines with chat prompts, ground truth and per-row tool arguments",
    config=PromptsConfig,
    factory="agentrl_dataset_prompts.prompts:PromptsFromFiles",
    requires=("datasets>=4.0",),
)

SHUFFLE = PluginSpec(
    kind="sampler",
    name="shuffle",
    api_version=1,
    summary="all rows in every epoch, in a new order each time",
    factory="agentrl_dataset_prompts.samplers:Shuffle",
)

SEQUENTIAL = PluginSpec(
    kind="sampler",
    name="sequential",
    api_version=1,
    summary="all rows in every epoch, in the order of the files",
    factory="agentrl_dataset_prompts.samplers:Sequential",
)

MIXTURE = PluginSpec(
    kind="sampler",
    name="mixture",
    api_version=1,
    summary="a fixed share of every batch from each data_source",
    config=MixtureConfig,
    factory="agentrl_dataset_prompts.samplers:Mixture",
)

CURRICULUM = PluginSpec(
    kind="sampler",
    name="curriculum",
    api_version=1,
    summary="prompts whose recent mean reward is near a target are drawn most",
    config=CurriculumConfig,
    factory="agentrl_dataset_prompts.samplers:Curriculum",
)
