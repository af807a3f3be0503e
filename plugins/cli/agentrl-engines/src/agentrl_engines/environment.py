"""Builds the separate environments of engines (``rollout.engine.python``) and of training backends
(``trainer.backend.python``)."""

import importlib.metadata
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from urllib.parse import unquote, urlparse

from agentrl_core.api import EngineError
from agentrl_core.api.errors import PluginError, PluginRequirementError
from agentrl_core.api.plugin import KINDS
from agentrl_core.plugins.discovery import INTERPRETER_KEYS, is_external
from agentrl_core.plugins.file_plugin import FILE_DIST
from agentrl_core.plugins.registration import registrations
from agentrl_core.plugins.resolution import ResolvedPlugin
from agentrl_core.serving.interpreter import CORE, check_interpreter

PINS = "environment.txt"
"""File of a plugin's import package with the versions that it was tested with, as constraints of pip."""

Command = list[str]


def setup_environment(
    plugin: ResolvedPlugin,
    folder: Path,
    extra: Sequence[str] = (),
    report: Callable[[Command], None] = lambda _: None,
    links: Sequence[str] = (),
) -> Path:
    """Make the environment, and see that it can serve; an existing one is brought up to date.

    Args:
        plugin: the engine or training backend.
        folder: of the environment.
        extra: more requirements, such as another build of an engine.
        report: called with each command before it runs.
        links: folders or pages with wheels, besides the package index.

    Returns:
        The path of its interpreter.

    Raises:
        PluginError: the plugin needs no environment of its own.
        ConfigError: what was built will not do.
        EngineError: a command failed.
    """
    python = folder / "bin" / "python"
    for command in setup_commands(plugin, folder, extra, links):
        report(command)
        # The caller's standard output is for the result.
        done = subprocess.run(command, stdout=sys.stderr, check=False)
        if done.returncode:
            raise EngineError(
                f"{shlex.join(command)} failed with exit code {done.returncode} (its output is above). Fix the cause "
                "and run this command again; installed packages stay. If the index lacks a package, --find-links names "
                "a folder of wheels"
            )
    check_interpreter(str(python), plugin.ref, plugin.spec, key=INTERPRETER_KEYS[plugin.ref.kind])
    return python


def setup_commands(
    plugin: ResolvedPlugin, folder: Path, extra: Sequence[str] = (), links: Sequence[str] = ()
) -> list[Command]:
    """What makes the environment: with uv where there is one, else with venv and pip.

    Raises:
        PluginError: the plugin needs no environment of its own.
    """
    spec, ref = plugin.spec, plugin.ref
    if not is_external(spec) or not spec.requires or ref.dist == FILE_DIST:
        raise PluginError(
            f"{KINDS[ref.kind].title} {ref.name!r} runs in the trainer's own environment: it needs no other one"
        )
    python = folder / "bin" / "python"
    trains = ref.kind == "training_backend"
    wanted = [*_own(CORE, "[train]" if trains else ""), *_own(ref.dist), f"ray=={_version('ray')}", *spec.requires]
    wanted += extra
    pins = files(spec.factory.partition(".")[0]) / PINS
    options = ["--constraint", str(pins)] if pins.is_file() else []
    options += [f"--find-links={link}" for link in links]
    uv = shutil.which("uv")
    if uv is not None:
        make = [uv, "venv", "--allow-existing", "--python", sys.executable, str(folder)]
        install = [uv, "pip", "install", "--python", str(python)]
    else:
        make = [sys.executable, "-m", "venv", str(folder)]
        install = [str(python), "-m", "pip", "install"]
    commands = [make, [*install, *options, *wanted]]
    if trains and (others := sorted(_plugins() - {CORE, ref.dist})):
        # Training processes get the whole configuration, with the options of every plugin: they need the packages of
        # these, but not what the plugins themselves require.
        links_only = [option for option in options if option.startswith("--find-links=")]
        commands.append([*install, "--no-deps", *links_only, *(part for dist in others for part in _own(dist))])
    return commands


def _plugins() -> set[str]:
    """Installed distributions with plugins."""
    return {each.dist for each in registrations() if each.dist != FILE_DIST}


def _own(dist: str, extras: str = "") -> list[str]:
    """The same version as here, from the same place, with these extras."""
    origin = json.loads(importlib.metadata.distribution(dist).read_text("direct_url.json") or "{}")
    url = urlparse(origin.get("url", ""))
    if url.scheme != "file":
        return [f"{dist}{extras}=={_version(dist)}"]
    path = unquote(url.path) + extras
    return ["--editable", path] if origin.get("dir_info", {}).get("editable") else [path]


def _version(dist: str) -> str:
    try:
        return importlib.metadata.version(dist)
    except importlib.metadata.PackageNotFoundError as error:
        raise PluginRequirementError(
            f"plugins with an environment of their own need {dist} here too: pip install 'agentrl-core[{dist}]'"
        ) from error
