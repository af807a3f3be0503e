"""Checks installed plugins more thoroughly than listing does: imports the factories and checks what they build."""

import faulthandler
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal

from agentrl_core.api.errors import PluginError
from agentrl_core.api.plugin import KINDS, PluginRef
from agentrl_core.plugins.child import exit_text, stdout_to_stderr
from agentrl_core.plugins.discovery import is_external
from agentrl_core.plugins.requirements import unmet
from agentrl_core.plugins.resolution import ResolvedPlugin, resolve_ref
from agentrl_testing.devtools.contract import factory_problems, option_problems, trial_build

HEAVY_MODULES = ("torch", "ray", "transformers", "vllm", "sglang")
"""Modules that a spec's module must not import, because listing plugins imports it."""

# Children may import torch: many of them in parallel are no faster, and fill the memory.
_AT_ONCE = 4
_GRACE_SECONDS = 10.0
_TIMEOUT_MARK = "Timeout ("


@dataclass(frozen=True)
class CheckResult:
    """The result of checking one plugin.

    Args:
        status: ``external``: only the spec was checked, because the plugin's requirements are not met here, but may be
            met in a separate interpreter.
        problems: empty unless the check failed.
        notes: what could not be checked, and why.
        traceback: traceback of the plugin's exception, if it raised one.
    """

    ref: PluginRef
    status: Literal["ok", "external", "failed"]
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    traceback: str = ""

    @property
    def title(self) -> str:
        """``tool 'shout' of package acme-tools 0.1.0``."""
        kind = KINDS[self.ref.kind].title if self.ref.kind in KINDS else self.ref.kind
        return f"{kind} {self.ref.name!r} of package {self.ref.dist} {self.ref.version}"


def failed(ref: PluginRef, problem: str, trace: str = "") -> CheckResult:
    """Make the result of a plugin with one problem."""
    return CheckResult(ref, "failed", (problem,), traceback=trace)


def check_here(ref: PluginRef) -> CheckResult:
    """Check a plugin in this process, which keeps what the plugin imports."""
    try:
        plugin = resolve_ref(ref)
        missing = unmet(plugin.spec.requires)
        if missing and is_external(plugin.spec):
            note = f"needs {', '.join(map(str, missing))}: only the spec was checked, the factory runs elsewhere"
            problems = option_problems(plugin.spec.config)
            return CheckResult(ref, "failed" if problems else "external", tuple(problems), (note,))
        return _check_factory(plugin)
    except PluginError as error:
        return failed(ref, str(error), _trace(error))


def check_alone(ref: PluginRef) -> CheckResult:
    """As :func:`check_here`, in a process that has imported nothing yet: also check what the spec's module imports."""
    before = set(sys.modules)
    try:
        spec = resolve_ref(ref).spec
    except PluginError as error:
        return failed(ref, str(error), _trace(error))
    heavy = [name for name in HEAVY_MODULES if name in sys.modules and name not in before]
    result = check_here(ref)
    if not heavy:
        return result
    problem = (
        f"package {ref.dist} {ref.version} is broken: importing the spec imports {', '.join(heavy)}; listing plugins "
        f"imports specs, so import it where the factory is, in {spec.factory.partition(':')[0]}"
    )
    return replace(result, status="failed", problems=(problem, *result.problems))


def check_in_children(refs: Sequence[PluginRef], time_limit: float) -> Iterator[CheckResult]:
    """:func:`check_alone` for each plugin in a new interpreter, in the order of ``refs``.

    Args:
        time_limit: seconds for one plugin.
    """
    with ThreadPoolExecutor(max_workers=min(_AT_ONCE, os.cpu_count() or 1)) as pool:
        yield from pool.map(lambda ref: _check_in_child(ref, time_limit), refs)


def _check_factory(plugin: ResolvedPlugin) -> CheckResult:
    problems = option_problems(plugin.spec.config)
    problems += factory_problems(plugin.spec, plugin.load())
    note = ""
    if not problems:
        problems, note = trial_build(plugin.spec, plugin.build)
    package = f"package {plugin.ref.dist} {plugin.ref.version} is broken: "
    found = tuple(package + problem for problem in problems)
    return CheckResult(plugin.ref, "failed" if found else "ok", found, (note,) if note else ())


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error.__cause__)) if error.__cause__ else ""


def _check_in_child(ref: PluginRef, time_limit: float) -> CheckResult:
    # -P: nothing may be imported from the working directory.
    command = [sys.executable, "-P", "-c", "from agentrl_testing.devtools.check import main; main()"]
    package = f"package {ref.dist} {ref.version} is broken: checking {KINDS[ref.kind].title} {ref.name!r}"
    try:
        arguments = [ref.kind, ref.name, ref.dist, ref.version, str(time_limit)]
        done = subprocess.run([*command, *arguments], capture_output=True, timeout=time_limit + _GRACE_SECONDS)
    except subprocess.TimeoutExpired as error:
        return failed(ref, f"{package} did not end within {time_limit:g} s", _text(error.stderr))
    if done.stdout:
        result: CheckResult = pickle.loads(done.stdout)
        return result
    output = _text(done.stderr)
    if _TIMEOUT_MARK in output:
        return failed(ref, f"{package} did not end within {time_limit:g} s", output)
    return failed(ref, f"{package} ended the process with {exit_text(done.returncode)}", output)


def _text(stderr: bytes | None) -> str:
    return (stderr or b"").decode(errors="replace")


def main() -> None:
    """Check one plugin in this new process: KIND NAME DIST VERSION SECONDS.

    The result goes to stdout, pickled; what the plugin prints goes to stderr.
    """
    *names, seconds = sys.argv[1:]
    faulthandler.enable()
    # Kills the process, and reports where it hung.
    faulthandler.dump_traceback_later(float(seconds), exit=True)
    with stdout_to_stderr():
        result = pickle.dumps(check_alone(PluginRef(*names)))
    with open(1, "wb", closefd=False) as stdout:
        stdout.write(result)
    # Not sys.exit(): threads that the plugin started would keep the process alive.
    os._exit(0)
