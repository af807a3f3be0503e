"""Whether the interpreter of an engine's or training backend's own environment will do, asked before anything
starts."""

import importlib.metadata
import json
import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from agentrl_core.api import ConfigError, PluginRef, PluginSpec
from agentrl_core.plugins.file_plugin import FILE_DIST

TIMEOUT = 60.0
"""Seconds for one start of the interpreter; a cold disk makes it slow."""
KEY = "rollout.engine.python"
CORE = "agentrl-core"
NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
"""Distributions with the NCCL that torch loads."""
logger = logging.getLogger(__name__)

# Standard library only: nothing of ours need be installed there. `unmet` is asked only where it is.
_QUESTION = """
import importlib.metadata, json, sys
names, requires = json.loads(sys.argv[1])
found = {}
for name in names:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found[name] = None
missing = []
try:
    from agentrl_core.plugins.requirements import unmet
    missing = [[state.requirement, state.found] for state in unmet(requires)]
except ImportError:
    pass
print("agentrl:" + json.dumps([list(sys.version_info[:3]), found, missing]))
"""


@dataclass(frozen=True)
class Answer:
    """What an interpreter says of itself: its version, installed versions by distribution, unmet requirements."""

    python: tuple[int, ...]
    versions: dict[str, str | None]
    missing: list[tuple[str, str]]


def check_interpreter(
    python: str,
    ref: PluginRef,
    spec: PluginSpec,
    packages: Sequence[str] = ("ray",),
    key: str = KEY,
    shares_nccl: bool = False,
) -> None:
    """Refuse an interpreter that cannot run a plugin: the server of an engine, or training processes.

    It needs this Python's minor version, exactly this version of ``packages``, of agentrl-core and of the plugin's
    distribution, and what the plugin requires. Another release of torch is a warning.

    Args:
        shares_nccl: the engine is in an NCCL group with training processes, which needs one version of NCCL.

    Raises:
        ConfigError: with everything that is wrong, and the commands that fix it.
    """
    wanted = [*packages, CORE, *([] if ref.dist in (CORE, FILE_DIST) else [ref.dist])]
    answer = _ask(python, [*wanted, "torch", *NCCL], spec.requires, key)
    problems = list(_problems(python, answer, wanted, key))
    problems += _other_nccl(python, answer, key) if shares_nccl else ()
    here, there = _installed("torch"), answer.versions.get("torch")
    if here and there and Version(here).release != Version(there).release:
        logger.warning("%s: %s has torch %s, this environment %s: not tested together", key, python, there, here)
    if problems:
        raise ConfigError(problems)


def _problems(python: str, answer: Answer, wanted: Sequence[str], key: str) -> Iterator[str]:
    here = sys.version_info
    if answer.python[:2] != here[:2]:
        version = ".".join(map(str, answer.python))
        yield (
            f"{key}: {python} is Python {version}, the driver runs {here[0]}.{here[1]}, and Ray needs the same minor "
            f"version everywhere; {_make_again(python)}"
        )
        return
    wrong = [(name, answer.versions[name]) for name in wanted if answer.versions[name] != _installed(name)]
    for name, found in wrong:
        state = f"has {name} {found}" if found else f"has no {name}"
        fix = f"{shlex.quote(python)} -m pip install '{name}=={_installed(name)}'"
        yield f"{key}: {python} {state}, the driver has {_installed(name)}; install the same there: {fix}"
    for requirement, found in answer.missing:
        yield (
            f"{key}: the plugin needs {requirement} in {python}, found {found or 'nothing'}; "
            f"{shlex.quote(python)} -m pip install '{requirement}'"
        )


def _other_nccl(python: str, answer: Answer, key: str) -> Iterator[str]:
    here, there = (
        next(filter(None, map(version, NCCL)), None) for version in (_installed, lambda name: answer.versions.get(name))
    )
    if here and there and Version(here).release != Version(there).release:
        yield (
            f"{key}: {python} has NCCL {there}, the trainer's environment {here}, and weights go from GPU to GPU in a "
            "group of both, for which NCCL needs one version: install the same torch in both, or set "
            "rollout.engine.weight_transfer=host_memory"
        )


def _ask(python: str, names: Sequence[str], requires: Sequence[str], key: str) -> Answer:
    if not os.path.isfile(python):
        is_new = os.path.basename(os.path.dirname(os.path.abspath(python))) == "bin"
        fix = f"make the environment with: {_make(_folder(python))}" if is_new else "expected ENVIRONMENT/bin/python"
        what = "a directory, not an interpreter" if os.path.isdir(python) else "no such file"
        raise ConfigError(f"{key}: {what}: {python}; {fix}")
    command = [python, "-c", _QUESTION, json.dumps([list(names), list(requires)])]
    # Its own packages only: PYTHONPATH here may be the driver's.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment, check=True)
        line = next(line for line in done.stdout.splitlines() if line.startswith("agentrl:"))
        found: list[Any] = json.loads(line.removeprefix("agentrl:"))
        return Answer(tuple(found[0]), dict(found[1]), [(str(name), str(version)) for name, version in found[2]])
    except subprocess.TimeoutExpired:
        reason = f"it did not answer within {TIMEOUT:g} s"
    except subprocess.CalledProcessError as error:
        reason = f"it ended with {error.returncode}: {(error.stderr.strip().splitlines() or ['it said nothing'])[-1]}"
    except (OSError, StopIteration, ValueError) as error:
        reason = f"it is no Python interpreter ({error or 'it said nothing'})"
    raise ConfigError(f"{key}: {python} cannot be asked for its packages: {reason}; {_make_again(python)}")


def _folder(python: str) -> str:
    """The environment that an interpreter belongs to."""
    return os.path.dirname(os.path.dirname(os.path.abspath(python)))


def _make(folder: str) -> str:
    return f"python{sys.version_info[0]}.{sys.version_info[1]} -m venv {shlex.quote(folder)}"


def _make_again(python: str) -> str:
    """Only where it is an environment: the command would change an installation of Python."""
    if os.path.isfile(os.path.join(_folder(python), "pyvenv.cfg")):
        return f"create the environment again: {_make(_folder(python))}"
    return f"expected ENVIRONMENT/bin/python; make one with: {_make('ENVIRONMENT')}"


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
