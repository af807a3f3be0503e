"""Lists what is installed. One broken plugin is a row with its reason, never a crash.

Only the modules that hold specs are imported, never an implementation. A child process imports them: one that hangs,
prints or ends the process does no more harm than one that raises.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal

from agentrl_core.api.errors import PluginBrokenError, PluginIncompatibleError
from agentrl_core.api.plugin import PluginSpec
from agentrl_core.plugins.child import Lost, map_in_child
from agentrl_core.plugins.registration import BLOCK_VARIABLE, Registration, block_list, is_blocked, registrations
from agentrl_core.plugins.requirements import installed_version, pip_command, unmet
from agentrl_core.plugins.spec import check_spec, import_spec

Status = Literal["ok", "external", "missing-extra", "broken", "incompatible", "duplicate", "blocked"]

SPEC_SECONDS = 10.0
"""How long the module of a spec may take to import: far more than a light one does on a busy machine."""


@dataclass(frozen=True)
class PluginRow:
    """One installed plugin.

    Args:
        status: ``ok``; ``external``: its requirements are not met here, but it may run in its own interpreter;
            ``missing-extra``: they are not met; ``broken``: its spec does not load or is wrong; ``incompatible``:
            written for another api_version; ``duplicate``: two packages register this kind and name; ``blocked``: by
            the configuration or ``AGENTRL_PLUGINS_BLOCK``, and not imported at all.
        error: the reason of any status but ``ok``, else empty.
        location: file of the spec's module, empty if it was not imported.
    """

    kind: str
    name: str
    dist: str
    version: str
    api_version: int | None
    status: Status
    summary: str = ""
    error: str = ""
    requires: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    factory: str = ""
    location: str = ""


def discover(
    kinds: Iterable[str] | None = None, block: Sequence[str] = (), time_limit: float = SPEC_SECONDS
) -> list[PluginRow]:
    """All installed plugins of the given kinds (all kinds by default), in a stable order.

    Args:
        kinds: keys of ``KINDS``.
        block: names, packages or ``package:name`` to exclude, in addition to those of ``AGENTRL_PLUGINS_BLOCK``.
        time_limit: seconds for importing the module of one spec; one that takes longer is ``broken``.
    """
    wanted = None if kinds is None else set(kinds)
    return plugin_rows([each for each in registrations() if wanted is None or each.kind in wanted], block, time_limit)


def plugin_rows(
    found: Sequence[Registration], block: Sequence[str] = (), time_limit: float = SPEC_SECONDS
) -> list[PluginRow]:
    """The rows of these registrations, as :func:`discover` makes them; duplicates are looked for among them."""
    blocked = block_list(block)
    usable = [each for each in found if not is_blocked(each, blocked)]
    row = partial(_row, usable=usable, version_of=cache(installed_version))
    rows = dict(zip(usable, map_in_child(row, usable, time_limit), strict=True))
    return [_blocked(each) if each not in rows else _found(each, rows[each]) for each in found]


INTERPRETER_KEYS = {"engine": "rollout.engine.python", "training_backend": "trainer.backend.python"}
"""By kind: the config key with the interpreter of a plugin's own environment."""


def is_external(spec: PluginSpec) -> bool:
    """Whether the plugin can run in another interpreter: an engine or training backend that does not share the actor's
    module."""
    return spec.kind in INTERPRETER_KEYS and "shared_module" not in spec.capabilities


def _bare(registration: Registration, status: Status, error: str) -> PluginRow:
    names = (registration.kind, registration.name, registration.dist, registration.version)
    return PluginRow(*names, api_version=None, status=status, error=error)


def _blocked(registration: Registration) -> PluginRow:
    return _bare(registration, "blocked", f"blocked by plugins.block or {BLOCK_VARIABLE}")


def _found(registration: Registration, row: PluginRow | Lost) -> PluginRow:
    if isinstance(row, PluginRow):
        return row
    target = f"importing {registration.entry_point.value} for {registration.title}"
    return _bare(registration, "broken", f"package {registration.package} is broken: {target} {row.reason}")


def _row(registration: Registration, usable: list[Registration], version_of: Callable[[str], str]) -> PluginRow:
    try:
        spec = import_spec(registration)
    except PluginBrokenError as error:
        return _bare(registration, "broken", str(error))
    status, reason = _status(registration, spec, usable, version_of)
    return replace(
        _bare(registration, status, reason),
        api_version=spec.api_version,
        summary=_first_line(spec.summary),
        requires=tuple(map(str, spec.requires)),
        capabilities=tuple(sorted(map(str, spec.capabilities))),
        factory=str(spec.factory),
        location=_location(registration),
    )


def _status(
    registration: Registration, spec: PluginSpec, usable: list[Registration], version_of: Callable[[str], str]
) -> tuple[Status, str]:
    try:
        check_spec(spec, registration)
    except PluginIncompatibleError as error:
        return "incompatible", str(error)
    except PluginBrokenError as error:
        return "broken", str(error)
    same = [each for each in usable if (each.kind, each.name) == (registration.kind, registration.name)]
    if len(same) > 1:
        return "duplicate", conflict_text(same)
    missing = unmet(spec.requires, version_of)
    if not missing:
        return "ok", ""
    needs = "needs " + ", ".join(map(str, missing))
    if is_external(spec):
        return "external", f"{needs}: runs in an environment that has it, see {INTERPRETER_KEYS[spec.kind]}"
    return "missing-extra", f"{needs}: {pip_command(missing)}"


def conflict_text(same: Sequence[Registration]) -> str:
    """Names the packages that register one kind and name, and how to select one."""
    packages = " and ".join(each.package for each in same)
    selections = " or ".join(f"'{name}'" for name in dict.fromkeys(f"{each.dist}:{each.name}" for each in same))
    return f"{same[0].title} is registered by {packages}: write {selections}, or uninstall one"


def _first_line(text: str) -> str:
    return next(iter(str(text).strip().splitlines()), "")


def _location(registration: Registration) -> str:
    module = sys.modules.get(registration.entry_point.module)
    return getattr(module, "__file__", None) or ""
