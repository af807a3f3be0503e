"""The part of every contract that needs no model: does a plugin import, is it built, has it the methods of its kind.

`examine` does it in this process. `examine_in_subprocess` does it in a fresh interpreter with a deadline, which a
plugin that hangs, exits or crashes cannot take along; that interpreter runs this module.
"""

import contextlib
import inspect
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from agentrl_core.api import agent_loop, algorithm, dataset, engine, interaction, reward, tool, tool_parser, tracker
from agentrl_core.api.errors import AgentRLError
from agentrl_core.api.plugin import PluginSpec
from agentrl_core.plugins.discovery import is_external
from agentrl_core.plugins.hooks import check_hook_methods
from agentrl_core.plugins.registration import Registration, registrations, same_package
from agentrl_core.plugins.requirements import pip_command, unmet
from agentrl_core.plugins.resolution import ResolvedPlugin, resolve_registration
from agentrl_core.plugins.spec import check_spec

HEAVY_MODULES = ("torch", "ray", "transformers", "tensordict", "datasets", "vllm", "sglang")
"""What the module of a spec must not import: listing plugins imports it."""
BASES: dict[str, type] = {
    "agent_loop": agent_loop.AgentLoopBase,
    "engine": engine.InferenceEngine,
    "tool": tool.Tool,
    "tool_parser": tool_parser.ToolParser,
    "interaction": interaction.Interaction,
    "reward_manager": reward.RewardManager,
    "advantage_estimator": algorithm.AdvantageEstimator,
    "policy_loss": algorithm.PolicyLoss,
    "dataset": dataset.PromptDataset,
    "tracker": tracker.Tracker,
}


class _Zero:
    """The one configured function of a reward manager under check."""

    name, weight = "zero", 1.0

    async def __call__(self, trajectory: reward.RewardTrajectory) -> reward.RewardResult:
        return reward.RewardResult(0.0)


CONTEXTS: dict[str, Callable[[str], Any]] = {
    "tool": tool.ToolContext,
    "tool_parser": lambda _: tool_parser.ToolParserContext(),
    "interaction": interaction.InteractionContext,
    "reward_function": reward.RewardFunctionContext,
    "reward_manager": lambda _: reward.RewardManagerContext((_Zero(),)),
    "advantage_estimator": lambda _: algorithm.AlgorithmContext(4),
    "policy_loss": lambda _: algorithm.AlgorithmContext(4),
}
"""Kinds that are built for a check. The others would read a model, write files or reach for a network."""
TEXTS = ("", "plain text", "<tool_call>", '{"name": "x", "arguments": ', "\x00\ud83d\ude00 </tool_call>")

Verdict = Literal["ok", "failed", "spec only"]


@dataclass(frozen=True)
class Finding:
    """What came of one plugin.

    Args:
        verdict: ``spec only``: it runs in another interpreter, and was checked as far as possible here.
        problem: why it failed, in a sentence that names the package.
        details: the traceback, where there is one.
        notes: what was not checked.
    """

    verdict: Verdict
    problem: str = ""
    details: str = ""
    notes: tuple[str, ...] = ()


@dataclass
class _Progress:
    """The package, and what is being done with it: the head of a message."""

    registration: Registration
    doing: str = ""
    notes: list[str] = field(default_factory=list)

    def failed(self, problem: str, details: str = "") -> Finding:
        """A finding that names package and plugin first."""
        head = f"package {self.registration.package}, {self.registration.title}"
        return Finding("failed", f"{head}: {problem}", details, tuple(self.notes))


def examine(kind: str, name: str, dist: str, fresh: bool = True) -> Finding:
    """Check one installed plugin in this process.

    Args:
        kind, name, dist: which.
        fresh: this interpreter has imported nothing heavy so far, so that what the spec imports can be seen.
    """
    registration = _registration(kind, name, dist)
    progress = _Progress(registration)
    try:
        return _examine(registration, progress, fresh)
    except AgentRLError as error:
        cause = error.__cause__ or error
        return Finding("failed", str(error), _trace(cause), tuple(progress.notes))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a foreign plugin may raise anything
        return progress.failed(f"{progress.doing} raised {type(error).__name__}: {error}", _trace(error))


def _examine(registration: Registration, progress: _Progress, fresh: bool) -> Finding:
    before = set(sys.modules)
    plugin = resolve_registration(registration)
    spec = plugin.spec
    check_spec(spec, registration)
    heavy = [module for module in HEAVY_MODULES if module in sys.modules and module not in before]
    if fresh and heavy:
        return progress.failed(
            f"the module of its spec, {registration.entry_point.module}, imports {', '.join(heavy)}; import that where "
            "it is used, in the module of the factory: `agentrl plugins list` imports every spec"
        )
    missing = unmet(spec.requires)
    if missing:
        needs = ", ".join(map(str, missing))
        if is_external(spec):
            note = f"needs {needs}; check the rest where that is installed: ENVIRONMENT/bin/agentrl plugins check"
            return Finding("spec only", notes=(note,))
        return progress.failed(f"needs {needs} in {sys.executable}: {pip_command(missing)}")
    progress.doing = f"importing the factory {spec.factory}"
    factory = plugin.load()
    problems = _factory_problems(spec, factory)
    if not problems and spec.kind in CONTEXTS:
        problems = _built_problems(plugin, progress)
    return progress.failed("; ".join(problems)) if problems else Finding("ok", notes=tuple(progress.notes))


def _factory_problems(spec: PluginSpec, factory: Any) -> list[str]:
    if not callable(factory):
        return [f"the factory {spec.factory} is an object of type {type(factory).__name__}, must be callable"]
    try:
        inspect.signature(factory).bind(None, None)
    except TypeError as error:
        return [f"the factory {spec.factory} cannot be called with (config, context): {error}"]
    except ValueError:
        # Written in C: it has no signature to look at.
        pass
    if not isinstance(factory, type):
        return []
    if spec.kind == "hook":
        check_hook_methods(spec.name, factory)
        return []
    return _member_problems(factory, BASES[spec.kind]) if spec.kind in BASES else []


def _member_problems(found: Any, base: type) -> list[str]:
    """What ``found``, a class or an object, lacks of the methods of ``base`` that must be there."""
    cls = found if isinstance(found, type) else type(found)
    problems = []
    for name in sorted(getattr(base, "__abstractmethods__", ())):
        mine, wanted = inspect.getattr_static(cls, name, None), inspect.getattr_static(base, name)
        if mine is None or getattr(mine, "__isabstractmethod__", False):
            problems.append(f"{cls.__name__} has no {name!r}, which {base.__name__} must have")
        elif inspect.iscoroutinefunction(wanted) and not inspect.iscoroutinefunction(mine):
            problems.append(f"{cls.__name__}.{name} must be a coroutine function (async def)")
    return problems


def _built_problems(plugin: ResolvedPlugin, progress: _Progress) -> list[str]:
    spec = plugin.spec
    try:
        config = spec.config()
    except TypeError:
        progress.notes.append("not built: its options have values that only a configuration gives")
        return []
    progress.doing = f"building it with {spec.factory}"
    try:
        built = plugin.build(config, CONTEXTS[spec.kind](spec.name))
    except AgentRLError as error:
        if error.__cause__ is not None:
            raise
        progress.notes.append(f"not built: it refuses its default options ({error})")
        return []
    if spec.kind == "reward_function":
        return (
            []
            if callable(built)
            else [f"{spec.factory} made an object of type {type(built).__name__}, must be callable"]
        )
    return _member_problems(built, BASES[spec.kind]) or _behaviour_problems(spec.kind, built, progress)


def _behaviour_problems(kind: str, built: Any, progress: _Progress) -> list[str]:
    if kind == "tool":
        progress.doing = "its schema"
        schema = built.schema
        json.dumps(schema)
        function = schema.get("function", {})
        if schema.get("type") != "function" or not function.get("name") or not function.get("description"):
            return ["its schema is no OpenAI function with name and description"]
    if kind == "tool_parser":
        for text in TEXTS:
            progress.doing = f"parse({text!r})"
            if not isinstance(built.parse(text), tool_parser.ParsedText):
                return [f"parse({text!r}) returned no ParsedText"]
    return []


def _registration(kind: str, name: str, dist: str) -> Registration:
    for each in registrations():
        if (each.kind, each.name) == (kind, name) and same_package(each.dist, dist):
            return each
    raise LookupError(f"{kind} {name!r} of {dist} is not installed for {sys.executable}")


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).strip()


def examine_in_subprocess(registration: Registration, seconds: float) -> Finding:
    """Check one plugin in a fresh interpreter that is ended after ``seconds``."""
    (finding,) = run_child([sys.executable, "-m", __name__], [registration], seconds)
    return finding


def run_child(command: Sequence[str], chosen: Sequence[Registration], seconds: float) -> list[Finding]:
    """Findings of a child that is told of the plugins in its last argument and answers on its standard output."""
    question = json.dumps([[each.kind, each.name, each.dist] for each in chosen])
    output = ""
    try:
        done = subprocess.run([*command, question], capture_output=True, text=True, timeout=seconds, check=False)
        output = done.stderr.strip()
        answers = json.loads(done.stdout)
        return [Finding(**{**answer, "notes": tuple(answer["notes"])}) for answer in answers]
    except subprocess.TimeoutExpired:
        reason = f"the check did not finish within {seconds:g} s"
    except ValueError:
        reason = f"the interpreter that checked it ended with code {done.returncode}"
    return [_Progress(each).failed(reason, output) for each in chosen]


def answer(findings: Callable[[list[list[str]]], list[Finding]]) -> None:
    """The child's side of `run_child`: nothing but the answer reaches the standard output."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            json.dump([asdict(finding) for finding in findings(json.loads(sys.argv[-1]))], out)
        out.flush()
        # Threads that a plugin has left running must not keep this process.
        os._exit(0)


if __name__ == "__main__":
    answer(lambda chosen: [examine(kind, name, dist) for kind, name, dist in chosen])
