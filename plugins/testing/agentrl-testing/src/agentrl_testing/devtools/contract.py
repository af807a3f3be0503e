"""The part of a kind's contract that `agentrl plugins check` checks: it needs no model, no data and no network.

The suites of :mod:`agentrl_testing` test what a plugin does. This module checks its types and signatures.
"""

import dataclasses
import inspect
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from agentrl_core.api.agent_loop import AgentLoopContext, ChatRenderer, TruncationSide
from agentrl_core.api.algorithm import AlgorithmContext
from agentrl_core.api.batch_policy import BatchPolicyContext
from agentrl_core.api.engine import PausableEngine, SessionEngine, SleepingEngine
from agentrl_core.api.environment import EnvironmentContext
from agentrl_core.api.errors import PluginBrokenError
from agentrl_core.api.hooks import HookContext
from agentrl_core.api.interaction import InteractionContext
from agentrl_core.api.plugin import PluginSpec
from agentrl_core.api.reward import RewardFunctionContext, RewardManagerContext, RewardResult, RewardTrajectory
from agentrl_core.api.tool import ToolContext
from agentrl_core.api.tool_parser import ToolParserContext
from agentrl_core.plugins.hooks import HookCaller

_BASES = {
    "agent_loop": "agent_loop:AgentLoopBase",
    "engine": "engine:InferenceEngine",
    "tool": "tool:Tool",
    "renderer": "renderer:Renderer",
    "tool_parser": "tool_parser:ToolParser",
    "interaction": "interaction:Interaction",
    "environment": "environment:Environment",
    "reward_manager": "reward:RewardManager",
    "advantage_estimator": "algorithm:AdvantageEstimator",
    "policy_loss": "algorithm:PolicyLoss",
    "rollout_correction": "algorithm:RolloutCorrection",
    "dataset": "dataset:PromptDataset",
    "sampler": "sampler:PromptSampler",
    "batch_policy": "batch_policy:BatchPolicy",
    "tracker": "tracker:Tracker",
    "training_backend": "training_backend:TrainingBackend",
}
"""Classes that what a factory builds must derive from; hooks and reward functions may be anything."""

_ABILITIES: dict[tuple[str, str], type] = {
    ("engine", "sessions"): SessionEngine,
    ("engine", "pause"): PausableEngine,
    ("engine", "sleep"): SleepingEngine,
}
"""By kind and capability: the methods that a class with this capability has in addition."""

_NOT_BUILT = {
    "engine": "an engine needs a model",
    "dataset": "a dataset needs files",
    "sampler": "a sampler needs rows",
    "renderer": "a renderer needs a tokenizer",
    "tracker": "a tracker may connect to a service",
    "training_backend": "a training backend needs a model",
}


class _Bytes(ChatRenderer):
    """Replaces a model's tokenizer, because a loop is only built here."""

    def render(self, messages: Sequence[Any], tools: Sequence[Any] = (), *, generation_prompt: bool = False) -> str:
        return "".join(str(message["content"]) for message in messages)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return bytes(ids).decode(errors="replace")

    def truncate(self, text: str, max_tokens: int, side: TruncationSide) -> str:
        return text[:max_tokens]


class _Zero:
    """Replaces the configured reward function, because a reward manager is only built here."""

    name = "zero"
    weight = 1.0

    async def __call__(self, trajectory: RewardTrajectory) -> RewardResult:
        return RewardResult(0.0)


def option_problems(config: type) -> list[str]:
    """Options that `agentrl plugins show` could not explain."""
    silent = [
        field.name for field in dataclasses.fields(config) if not getattr(field.metadata.get("agentrl"), "help", "")
    ]
    if not silent:
        return []
    return [f"options of {config.__name__} without a help text: {', '.join(silent)}; declare them with option(help=…)"]


def factory_problems(spec: PluginSpec, factory: Any) -> list[str]:
    """What is wrong with an imported factory, before it is called."""
    try:
        inspect.signature(factory).bind(None, None)
    except TypeError as error:
        return [f"factory {spec.factory} cannot be called with (config, context): {error}"]
    except ValueError:
        # Some callables of C have no signature to look at.
        return []
    return class_problems(spec, factory) if inspect.isclass(factory) else []


def class_problems(spec: PluginSpec, cls: type) -> list[str]:
    """Where a class breaks the contract of its kind: base class, missing methods, ``async`` or not."""
    if spec.kind not in _BASES:
        return []
    module, _, name = _BASES[spec.kind].partition(":")
    base = getattr(import_module(f"agentrl_core.api.{module}"), name)
    if not issubclass(cls, base):
        return [f"{cls.__name__} is no {name}: derive it from agentrl_core.api.{name}"]
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    problems = [f"{cls.__name__} does not implement {', '.join(missing)}"] if missing else []
    declared = _methods(base)
    for capability in sorted(spec.capabilities):
        methods = _methods(_ABILITIES.get((spec.kind, capability), object))
        missing = sorted(method for method in methods if not hasattr(cls, method))
        if missing:
            problems.append(f"{cls.__name__} does not implement {', '.join(missing)} of the capability {capability!r}")
        else:
            declared |= methods
    for method, function in declared.items():
        found = inspect.unwrap(getattr(cls, method))
        if inspect.iscoroutinefunction(function) != inspect.iscoroutinefunction(found):
            word = "must" if inspect.iscoroutinefunction(function) else "must not"
            problems.append(f"{cls.__name__}.{method} {word} be `async def`")
    return problems


def _methods(cls: type) -> dict[str, Any]:
    return {name: each for name, each in vars(cls).items() if inspect.isfunction(each) and not name.startswith("_")}


def trial_build(spec: PluginSpec, build: Callable[[Any, Any], Any]) -> tuple[list[str], str]:
    """Build the plugin with its default options, if its kind and options allow that.

    Args:
        build: ``build(config, context)``, as :meth:`ResolvedPlugin.build`.

    Returns:
        What is wrong with what it built, and why it was not built (empty where it was).
    """
    if spec.kind in _NOT_BUILT:
        return [], f"not built: {_NOT_BUILT[spec.kind]}"
    required = [
        field.name
        for field in dataclasses.fields(spec.config)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if required:
        return [], f"not built: no default for {', '.join(required)}"
    with tempfile.TemporaryDirectory(prefix="agentrl-check-") as directory:
        built = build(spec.config(), _context(spec, Path(directory)))
        return _object_problems(spec, built), ""


def _object_problems(spec: PluginSpec, built: Any) -> list[str]:
    if spec.kind == "reward_function":
        return [] if callable(built) else [f"{spec.factory} built a {type(built).__name__}, must be callable"]
    if spec.kind == "hook":
        try:
            HookCaller([(spec.name, built)])
        except PluginBrokenError as error:
            return [str(error)]
    problems = class_problems(spec, type(built))
    if spec.kind == "tool" and not problems and not _is_function_schema(getattr(built, "schema", None)):
        problems.append(f"{type(built).__name__}.schema is no OpenAI function schema: make it with function_schema()")
    return problems


def _is_function_schema(schema: Any) -> bool:
    return isinstance(schema, dict) and "name" in schema.get("function", {})


def _context(spec: PluginSpec, directory: Path) -> Any:
    contexts: dict[str, Callable[[], Any]] = {
        "agent_loop": lambda: AgentLoopContext(_Bytes(), None, (), (), max_response_length=64),
        "tool": lambda: ToolContext(spec.name),
        "tool_parser": ToolParserContext,
        "interaction": lambda: InteractionContext(spec.name),
        "environment": lambda: EnvironmentContext(spec.name),
        "reward_manager": lambda: RewardManagerContext((_Zero(),)),
        "reward_function": lambda: RewardFunctionContext(spec.name),
        "advantage_estimator": lambda: AlgorithmContext(group_size=2),
        "policy_loss": lambda: AlgorithmContext(group_size=2),
        "rollout_correction": lambda: AlgorithmContext(group_size=2),
        "batch_policy": lambda: BatchPolicyContext(batch_size=2, max_staleness=1, pipeline_depth=1),
        "hook": lambda: HookContext(spec.name, directory),
    }
    return contexts[spec.kind]()
