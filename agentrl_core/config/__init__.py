"""Configuration: the schema, and the way from a YAML file to a checked tree."""

# ruff: noqa: I001 - one name on each line, each written once

from agentrl_core.config.describe import OptionDoc as OptionDoc, describe as describe
from agentrl_core.config.loading import bind as bind, load_config as load_config, load_with_origins as load_with_origins
from agentrl_core.config.schema import (
    ActorConfig as ActorConfig,
    AdvantageSlot as AdvantageSlot,
    AgentConfig as AgentConfig,
    AgentLoopSlot as AgentLoopSlot,
    Aggregation as Aggregation,
    AlgorithmConfig as AlgorithmConfig,
    CheckpointConfig as CheckpointConfig,
    ClusterConfig as ClusterConfig,
    Config as Config,
    CorrectionSlot as CorrectionSlot,
    CriticConfig as CriticConfig,
    DataConfig as DataConfig,
    DatasetSlot as DatasetSlot,
    EngineSlot as EngineSlot,
    HookSlot as HookSlot,
    InteractionSlot as InteractionSlot,
    ModelConfig as ModelConfig,
    NamedEngineSlot as NamedEngineSlot,
    OptimizerConfig as OptimizerConfig,
    PluginsConfig as PluginsConfig,
    PolicyLossSlot as PolicyLossSlot,
    ReferenceConfig as ReferenceConfig,
    ResolvedConfig as ResolvedConfig,
    RewardConfig as RewardConfig,
    RewardFunctionSlot as RewardFunctionSlot,
    RewardManagerSlot as RewardManagerSlot,
    RolloutConfig as RolloutConfig,
    SamplingConfig as SamplingConfig,
    ToolParserSlot as ToolParserSlot,
    ToolSlot as ToolSlot,
    TrackerSlot as TrackerSlot,
    TrainerConfig as TrainerConfig,
    UpdateConfig as UpdateConfig,
    ValidationConfig as ValidationConfig,
)
from agentrl_core.config.slots import Slot as Slot
from agentrl_core.config.writing import to_commented_yaml as to_commented_yaml, to_dict as to_dict, to_yaml as to_yaml
