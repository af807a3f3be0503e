"""All that a plugin may import.

One file per kind of plugin; each states its contract and shows a ten-line example.
"""

# ruff: noqa: F403 - the names are written once, in the tuples below

from importlib import import_module
from typing import TYPE_CHECKING, Any

_NAMES_OF_MODULE = {
    "agent_loop": (
        "AgentLoopBase", "AgentLoopContext", "AgentLoopOutput", "ChatRenderer", "Message",
        "Status", "Termination", "ToolOutcome", "Trajectory", "TrajectorySession", "TruncationSide", "Turn",
    ),
    "algorithm": (
        "AdvantageEstimator", "AdvantageInput", "AdvantageOutput", "AlgorithmContext", "CorrectionInput",
        "CorrectionOutput", "PolicyLoss", "PolicyLossInput", "PolicyLossOutput", "PreparedLoss", "RolloutCorrection",
    ),
    "batch_policy": ("BatchPolicy", "BatchPolicyContext", "PendingGroup", "PipelineState"),
    "concurrency": ("together",),
    "config": ("NoConfig", "OptionInfo", "option"),
    "dataset": ("DatasetContext", "PromptDataset"),
    "engine": (
        "AdapterSlots", "EngineContext", "InferenceEngine", "MeasuredEngine", "MultiModal", "PausableEngine",
        "PolicySpan", "ProgressingEngine", "SamplingParams", "SessionEngine", "SleepingEngine", "TokenOutput",
    ),
    "engine_client": ("EngineClient", "Engines"),
    "environment": ("Environment", "EnvironmentContext", "Episode"),
    "errors": (
        "AgentRLError", "BodyTooLargeError", "CheckpointError", "ConfigError", "DataError", "DeadlineError",
        "EngineError", "EpisodeError", "HttpError", "ImageError", "InteractionError", "PluginBrokenError",
        "PluginConflictError",
        "PluginDriftError", "PluginError", "PluginIncompatibleError", "PluginNotFoundError",
        "PluginRequirementError", "ProtocolError",
        "RewardError", "RolloutError", "TemplateError", "ToolError", "ToolUnavailableError", "WorkerError",
    ),
    "hooks": ("EndedTrajectory", "HookContext", "HookSpecs", "hookimpl"),
    "http": ("bounded_body", "fetch", "fetch_json"),
    "interaction": ("Interaction", "InteractionContext", "InteractionTurn"),
    "plugin": ("KINDS", "PluginKind", "PluginRef", "PluginSpec"),
    "renderer": ("Conversation", "ParsedTurn", "Rendered", "Renderer", "RendererContext"),
    "reward": (
        "BoundRewardFunction", "RewardFunction", "RewardFunctionContext", "RewardManager", "RewardManagerContext",
        "RewardResult", "RewardTrajectory",
    ),
    "sampler": ("PromptOutcome", "PromptSampler", "SamplerContext"),
    "tool": ("FunctionTool", "Tool", "ToolContext", "ToolResponse", "ToolResult", "function_schema", "schema_of"),
    "tool_parser": ("ParsedText", "ToolCall", "ToolParser", "ToolParserContext"),
    "tracker": ("Tracker", "TrackerContext", "trajectory_table"),
    "training_backend": (
        "TRAINING_FOLDER", "AdapterPlan", "DataShare", "MicroBatch", "Outputs", "TrainingBackend", "TrainingContext",
        "Wanted",
    ),
    "tree": ("Call", "Earned", "Node", "Request", "Tree", "TreePath"),
    "weights": ("Adapter", "ArrayBucket", "WeightUpdate", "map_safetensors"),
}  # fmt: skip
_MODULE_OF_NAME = {name: module for module, names in _NAMES_OF_MODULE.items() for name in names}

if TYPE_CHECKING:
    # Type checkers see every name of these modules; the tuples above say which ones are public.
    from agentrl_core.api.agent_loop import *
    from agentrl_core.api.algorithm import *
    from agentrl_core.api.batch_policy import *
    from agentrl_core.api.concurrency import *
    from agentrl_core.api.config import *
    from agentrl_core.api.dataset import *
    from agentrl_core.api.engine import *
    from agentrl_core.api.engine_client import *
    from agentrl_core.api.environment import *
    from agentrl_core.api.errors import *
    from agentrl_core.api.hooks import *
    from agentrl_core.api.http import *
    from agentrl_core.api.interaction import *
    from agentrl_core.api.plugin import *
    from agentrl_core.api.renderer import *
    from agentrl_core.api.reward import *
    from agentrl_core.api.sampler import *
    from agentrl_core.api.tool import *
    from agentrl_core.api.tool_parser import *
    from agentrl_core.api.tracker import *
    from agentrl_core.api.weights import *
else:
    __all__ = sorted(_MODULE_OF_NAME)


def __getattr__(name: str) -> Any:
    # The spec of a plugin needs two of these modules: listing many plugins must not import the others.
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_MODULE_OF_NAME[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(_MODULE_OF_NAME)
