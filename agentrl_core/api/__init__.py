"""All that a plugin may import.

One file per kind of plugin; each states its contract and shows a ten-line example.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl_core.api.agent_loop import (
        AgentLoopBase,
        AgentLoopContext,
        AgentLoopOutput,
        ChatRenderer,
        Message,
        Termination,
        ToolOutcome,
        Trajectory,
        TrajectorySession,
        TruncationSide,
        Turn,
    )
    from agentrl_core.api.algorithm import (
        AdvantageEstimator,
        AdvantageInput,
        AdvantageOutput,
        AlgorithmContext,
        PolicyLoss,
        PolicyLossInput,
        PolicyLossOutput,
    )
    from agentrl_core.api.config import NoConfig, OptionInfo, option
    from agentrl_core.api.dataset import DatasetContext, PromptDataset
    from agentrl_core.api.engine import (
        EngineContext,
        InferenceEngine,
        PolicySpan,
        SamplingParams,
        TokenOutput,
    )
    from agentrl_core.api.errors import (
        AgentRLError,
        CheckpointError,
        ConfigError,
        DataError,
        DeadlineError,
        EngineError,
        InteractionError,
        PluginBrokenError,
        PluginConflictError,
        PluginDriftError,
        PluginError,
        PluginIncompatibleError,
        PluginNotFoundError,
        PluginRequirementError,
        ProtocolError,
        RewardError,
        RolloutError,
        TemplateError,
        ToolError,
        WorkerError,
    )
    from agentrl_core.api.hooks import EndedTrajectory, HookContext, HookSpecs, hookimpl
    from agentrl_core.api.interaction import Interaction, InteractionContext, InteractionTurn
    from agentrl_core.api.plugin import KINDS, PluginKind, PluginRef, PluginSpec
    from agentrl_core.api.reward import (
        BoundRewardFunction,
        RewardFunction,
        RewardFunctionContext,
        RewardManager,
        RewardManagerContext,
        RewardResult,
        RewardTrajectory,
    )
    from agentrl_core.api.tool import (
        FunctionTool,
        Tool,
        ToolContext,
        ToolResponse,
        ToolResult,
        function_schema,
        schema_of,
    )
    from agentrl_core.api.tool_parser import ParsedText, ToolCall, ToolParser, ToolParserContext
    from agentrl_core.api.tracker import Tracker, TrackerContext
    from agentrl_core.api.weights import ArrayBucket, LoraAdapter, WeightUpdate, map_safetensors

__all__ = [
    "AdvantageEstimator",
    "AdvantageInput",
    "AdvantageOutput",
    "AgentLoopBase",
    "AgentLoopContext",
    "AgentLoopOutput",
    "AgentRLError",
    "AlgorithmContext",
    "ArrayBucket",
    "BoundRewardFunction",
    "ChatRenderer",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DatasetContext",
    "DeadlineError",
    "EndedTrajectory",
    "EngineContext",
    "EngineError",
    "FunctionTool",
    "HookContext",
    "HookSpecs",
    "InferenceEngine",
    "Interaction",
    "InteractionContext",
    "InteractionError",
    "InteractionTurn",
    "KINDS",
    "LoraAdapter",
    "Message",
    "NoConfig",
    "OptionInfo",
    "ParsedText",
    "PluginBrokenError",
    "PluginConflictError",
    "PluginDriftError",
    "PluginError",
    "PluginIncompatibleError",
    "PluginKind",
    "PluginNotFoundError",
    "PluginRef",
    "PluginRequirementError",
    "PluginSpec",
    "PolicyLoss",
    "PolicyLossInput",
    "PolicyLossOutput",
    "PolicySpan",
    "PromptDataset",
    "ProtocolError",
    "RewardError",
    "RewardFunction",
    "RewardFunctionContext",
    "RewardManager",
    "RewardManagerContext",
    "RewardResult",
    "RewardTrajectory",
    "RolloutError",
    "SamplingParams",
    "TemplateError",
    "Termination",
    "TokenOutput",
    "Tool",
    "ToolCall",
    "ToolContext",
    "ToolError",
    "ToolOutcome",
    "ToolParser",
    "ToolParserContext",
    "ToolResponse",
    "ToolResult",
    "Tracker",
    "TrackerContext",
    "Trajectory",
    "TrajectorySession",
    "TruncationSide",
    "Turn",
    "WeightUpdate",
    "WorkerError",
    "function_schema",
    "hookimpl",
    "map_safetensors",
    "option",
    "schema_of",
]

_NAMES_OF_MODULE = {
    "agent_loop": (
        "AgentLoopBase", "AgentLoopContext", "AgentLoopOutput", "ChatRenderer", "Message",
        "Termination", "ToolOutcome", "Trajectory", "TrajectorySession", "TruncationSide", "Turn",
    ),
    "algorithm": (
        "AdvantageEstimator", "AdvantageInput", "AdvantageOutput", "AlgorithmContext", "PolicyLoss", "PolicyLossInput",
        "PolicyLossOutput",
    ),
    "config": ("NoConfig", "OptionInfo", "option"),
    "dataset": ("DatasetContext", "PromptDataset"),
    "engine": ("EngineContext", "InferenceEngine", "PolicySpan", "SamplingParams", "TokenOutput"),
    "errors": (
        "AgentRLError", "CheckpointError", "ConfigError", "DataError", "DeadlineError", "EngineError",
        "InteractionError", "PluginBrokenError", "PluginConflictError", "PluginDriftError", "PluginError",
        "PluginIncompatibleError", "PluginNotFoundError", "PluginRequirementError", "ProtocolError", "RewardError",
        "RolloutError", "TemplateError", "ToolError", "WorkerError",
    ),
    "hooks": ("EndedTrajectory", "HookContext", "HookSpecs", "hookimpl"),
    "interaction": ("Interaction", "InteractionContext", "InteractionTurn"),
    "plugin": ("KINDS", "PluginKind", "PluginRef", "PluginSpec"),
    "reward": (
        "BoundRewardFunction", "RewardFunction", "RewardFunctionContext", "RewardManager", "RewardManagerContext",
        "RewardResult", "RewardTrajectory",
    ),
    "tool": ("FunctionTool", "Tool", "ToolContext", "ToolResponse", "ToolResult", "function_schema", "schema_of"),
    "tool_parser": ("ParsedText", "ToolCall", "ToolParser", "ToolParserContext"),
    "tracker": ("Tracker", "TrackerContext"),
    "weights": ("ArrayBucket", "LoraAdapter", "WeightUpdate", "map_safetensors"),
}  # fmt: skip
_MODULE_OF_NAME = {name: module for module, names in _NAMES_OF_MODULE.items() for name in names}


def __getattr__(name: str) -> Any:
    # The spec of a plugin needs two of these modules: listing many plugins must not import the others.
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_MODULE_OF_NAME[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
