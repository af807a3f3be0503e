"""Loads the spec that an entry point names and checks it against its kind."""

import contextlib
import dataclasses
import difflib
import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from agentrl_core.api.errors import PluginBrokenError, PluginIncompatibleError
from agentrl_core.api.plugin import KINDS, PluginSpec
from agentrl_core.plugins.registration import Registration

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
_FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")

_IMPORT_MACHINERY = ("<frozen ", os.path.dirname(importlib.__file__))


def load_spec(registration: Registration, load: Callable[[], Any] | None = None) -> PluginSpec:
    """:func:`import_spec`, then :func:`check_spec`."""
    spec = import_spec(registration, load)
    check_spec(spec, registration)
    return spec


def imported(package: str, what: str, load: Callable[[], Any]) -> Any:
    """What ``load`` returns.

    Raises:
        PluginBrokenError: it raised; names the package and what was to be imported.
    """
    try:
        return load()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a foreign module may raise anything, sys.exit included
        raise PluginBrokenError(f"package {package} is broken: {what} raised {describe_exception(error)}") from error


def import_spec(registration: Registration, load: Callable[[], Any] | None = None) -> PluginSpec:
    """Import the spec's module. What the module prints goes to stderr.

    Args:
        registration: the entry point.
        load: returns the object that the entry point names; by default ``entry_point.load``.

    Raises:
        PluginBrokenError: the import raised, or the entry point names something else than a spec.
    """
    if registration.kind not in KINDS:
        raise PluginBrokenError(f"package {registration.package}: {unknown_group(registration.kind)}")
    target = registration.entry_point.value
    with contextlib.redirect_stdout(sys.stderr):
        what = f"importing {target} for {registration.title}"
        spec = imported(registration.package, what, load or registration.entry_point.load)
    if not isinstance(spec, PluginSpec):
        raise PluginBrokenError(
            f"package {registration.package} is broken: {target} for {registration.title} is an object "
            f"of type {type(spec).__name__}, must be a PluginSpec"
        )
    return spec


def check_spec(spec: PluginSpec, registration: Registration) -> None:
    """Check a spec against its kind and its entry point.

    Raises:
        PluginIncompatibleError: it was written for another api_version (other differences are then not reported).
        PluginBrokenError: it is not what it should be; all problems are named.
    """
    kind = KINDS[registration.kind]
    current = kind.api_version
    if isinstance(spec.api_version, int) and spec.api_version not in (current, *kind.adapted):
        outdated = registration.dist if spec.api_version < current else "agentrl-core"
        raise PluginIncompatibleError(
            f"{registration.title} of package {registration.package} was written for api_version {spec.api_version} "
            f"of {registration.kind}; this agentrl-core has {current}. Upgrade {outdated}: "
            f"pip install --upgrade {outdated}"
        )
    problems = spec_problems(spec, registration.kind, registration.name)
    if problems:
        raise PluginBrokenError(
            f"package {registration.package} is broken: {registration.entry_point.value} for {registration.title}: "
            + "; ".join(problems)
        )


def spec_problems(spec: PluginSpec, kind: str, name: str) -> list[str]:
    """What is wrong with a spec that is registered under this kind and name; empty if nothing is."""
    checks = [
        (spec.kind == kind, f"kind is {spec.kind!r}, but the entry point is in group {KINDS[kind].group!r}"),
        (spec.name == name, f"name is {spec.name!r}, but the entry point is named {name!r}"),
        (
            bool(_NAME.fullmatch(str(spec.name))),
            f"name {spec.name!r} may hold only lower-case letters, digits, '_', '-'",
        ),
        (
            isinstance(spec.summary, str) and bool(spec.summary.strip()),
            "summary is empty, must be one line for `agentrl plugins list`",
        ),
        (isinstance(spec.api_version, int), f"api_version is {spec.api_version!r}, must be an integer"),
        (
            isinstance(spec.factory, str) and bool(_FACTORY.fullmatch(spec.factory)),
            f"factory is {spec.factory!r}, must be 'package.module:attribute'",
        ),
    ]
    problems = [problem for passed, problem in checks if not passed]
    return (
        problems
        + config_problems(spec.config)
        + _requirement_problems(spec.requires)
        + capability_problems(kind, spec.capabilities)
    )


def config_problems(config: Any) -> list[str]:
    """What is wrong with a config class."""
    if isinstance(config, type) and dataclasses.is_dataclass(config):
        return []
    return [f"config is {config!r}, must be a dataclass"]


def capability_problems(kind: str, capabilities: Any) -> list[str]:
    """What is wrong with the declared capabilities of one kind."""
    known = KINDS[kind].capabilities
    if not isinstance(capabilities, set | frozenset | tuple | list):
        return [f"capabilities is {capabilities!r}, must be a frozenset of names"]
    problems = []
    for name in sorted(set(map(str, capabilities)) - set(known)):
        close = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        allowed = f"allowed are {', '.join(known)}" if known else f"a {KINDS[kind].title} has none"
        problems.append(f"unknown capability {name!r}: {hint}{allowed}")
    return problems


def describe_exception(error: BaseException) -> str:
    """``ValueError: text (file.py:12)``; without the place where only the import machinery or this package raised."""
    text = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    place = _place(error)
    return f"{text} ({place})" if place else text


def _place(error: BaseException) -> str:
    # Here, because only errors need it, and listing has to be quick.
    import stevedore

    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    # The backport of importlib.metadata, which some libraries install, takes the place of Python's own.
    while places and (places[-1][0].startswith(_IMPORT_MACHINERY) or "/importlib_metadata/" in places[-1][0]):
        places.pop()
    if not places or places[-1][0].startswith((os.path.dirname(__file__), os.path.dirname(stevedore.__file__))):
        return ""
    return f"{places[-1][0]}:{places[-1][1]}"


def _requirement_problems(requires: Any) -> list[str]:
    if not isinstance(requires, tuple | list):
        return [f"requires is {requires!r}, must be a tuple of PEP 508 strings"]
    problems = []
    for text in requires:
        try:
            Requirement(text)
        except (InvalidRequirement, TypeError):
            problems.append(f"requires holds {text!r}, which is not a PEP 508 requirement such as 'sglang>=0.5'")
    return problems


def unknown_group(group: str) -> str:
    """The message for an ``agentrl.`` entry-point group that no kind has."""
    groups = [kind.group for kind in KINDS.values()]
    close = difflib.get_close_matches(group, groups, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"allowed are {', '.join(groups)}"
    return f"unknown entry-point group {group!r}: {hint}"
