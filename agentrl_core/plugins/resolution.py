"""From a name in a configuration to a plugin, and from a reference in a worker to the same plugin.

Resolving imports the module that holds the spec; :meth:`ResolvedPlugin.load` imports the implementation.
"""

import difflib
import importlib
import importlib.metadata
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path
from typing import Any

from stevedore.driver import DriverManager

from agentrl_core.api.errors import (
    AgentRLError,
    PluginBrokenError,
    PluginConflictError,
    PluginDriftError,
    PluginNotFoundError,
    PluginRequirementError,
)
from agentrl_core.api.plugin import KINDS, PluginRef, PluginSpec
from agentrl_core.api.tool import FunctionTool
from agentrl_core.plugins.boundary import boundary, hang_reported
from agentrl_core.plugins.class_environment import ClassEnvironment, is_environment_class
from agentrl_core.plugins.discovery import INTERPRETER_KEYS, conflict_text, is_external
from agentrl_core.plugins.file_plugin import (
    FILE_DIST,
    file_ref,
    file_spec,
    is_file_name,
    is_plain_function,
    load_file_object,
    top_level_names,
    unread_spec,
)
from agentrl_core.plugins.official import OFFICIAL
from agentrl_core.plugins.registration import (
    BLOCK_VARIABLE,
    Registration,
    block_list,
    is_blocked,
    named,
    registrations,
    same_package,
)
from agentrl_core.plugins.requirements import pip_command, unmet
from agentrl_core.plugins.spec import describe_exception, imported, load_spec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResolvedPlugin:
    """A plugin that exists, fits this core, and is the only one of its name."""

    spec: PluginSpec
    ref: PluginRef

    def load(self) -> Any:
        """Import the factory. For a file, the object itself: a class, a factory, or a plain function.

        Raises:
            PluginRequirementError: a requirement is not met in this interpreter.
            PluginBrokenError: the import raised, or the module has no such attribute.
        """
        if self.ref.dist == FILE_DIST:
            return load_file_object(self.ref)
        self._check_requirements()
        module_name, _, attribute = self.spec.factory.partition(":")
        what = f"importing the factory {self.spec.factory} of {self._title}"
        return imported(
            self._package, what, lambda: reduce(getattr, attribute.split("."), importlib.import_module(module_name))
        )

    def build(self, config: Any, context: Any) -> Any:
        """``factory(config, context)``. A plain function of a file serves as the tool or reward function itself.

        Raises:
            PluginBrokenError: the factory raised; errors of agentrl's own tree pass unchanged.
        """
        factory = self.load()
        origin = self.ref.path if self.ref.dist == FILE_DIST else f"package {self._package}"
        what = f"{origin}: building {self._title} raised"
        raised = boundary(PluginBrokenError, what, keep=(AgentRLError,), describe=describe_exception)
        with raised, hang_reported(f"building {self._title}"):
            if is_plain_function(self.ref, factory):
                return FunctionTool(factory, context) if self.ref.kind == "tool" else factory
            if self.ref.kind == "environment" and is_environment_class(factory):
                return ClassEnvironment(factory, config, context)
            return factory(config, context)

    @property
    def _title(self) -> str:
        return f"{KINDS[self.ref.kind].title} {self.ref.name!r}"

    @property
    def _package(self) -> str:
        return f"{self.ref.dist} {self.ref.version}"

    def _check_requirements(self) -> None:
        missing = unmet(self.spec.requires)
        if missing:
            key = INTERPRETER_KEYS[self.spec.kind] if is_external(self.spec) else ""
            elsewhere = f", or set {key} to an environment that has it" if key else ""
            raise PluginRequirementError(
                f"{self._title} of package {self._package} needs {', '.join(map(str, missing))} in {sys.executable}: "
                f"{pip_command(missing)}{elsewhere}"
            )


def resolve(
    kind: str, name: str, *, base_dir: Path | None = None, block: Sequence[str] = (), run_files: bool = True
) -> ResolvedPlugin:
    """The one plugin that a slot names.

    Args:
        kind: a key of ``KINDS``.
        name: a registered name, ``package:name``, or ``path/to/file.py:object``.
        base_dir: what a relative file is relative to (the directory of the config file); default: the working one.
        block: names, packages or ``package:name`` to exclude, in addition to those of ``AGENTRL_PLUGINS_BLOCK``.
        run_files: run the file that a slot names; without, its options and capabilities are unknown.

    Raises:
        PluginNotFoundError: nothing usable has this name; the nearest name and the `pip install` line are given.
        PluginConflictError: two packages register it.
        PluginIncompatibleError: it was written for another api_version.
        PluginBrokenError: its spec does not load or is wrong, or its file raised.
    """
    if kind not in KINDS:
        raise PluginNotFoundError(f"there is no plugin kind {kind!r}; allowed are {', '.join(KINDS)}")
    if is_file_name(name):
        ref = file_ref(kind, name, base_dir or Path.cwd(), run_files)
        return ResolvedPlugin(file_spec(ref) if run_files else unread_spec(ref), ref)
    return _resolved(_select(kind, name, block, base_dir or Path.cwd()))


@cache
def resolve_ref(ref: PluginRef) -> ResolvedPlugin:
    """The plugin that the driver resolved, in this process; looked up once, as installations do not change under way.

    Raises:
        PluginDriftError: another version or another package is installed here.
        PluginNotFoundError: it is not installed here.
        PluginIncompatibleError, PluginBrokenError: as in :func:`resolve`.
    """
    if ref.dist == FILE_DIST:
        return ResolvedPlugin(file_spec(ref), ref)
    same_name = [each for each in registrations() if (each.kind, each.name) == (ref.kind, ref.name)]
    same_dist = [each for each in same_name if same_package(each.dist, ref.dist)]
    title = f"{KINDS[ref.kind].title} {ref.name!r}"
    fix = f"in this environment: pip install '{ref.dist}=={ref.version}'"
    if not same_name:
        raise PluginNotFoundError(
            f"{title} of package {ref.dist} {ref.version}, which the driver uses, is not installed for "
            f"{sys.executable}; {fix}"
        )
    if len(same_dist) > 1:
        raise PluginConflictError(conflict_text(same_dist))
    found = (same_dist or same_name)[0]
    if not same_dist or found.version != ref.version:
        raise PluginDriftError(
            f"{title} is {ref.dist} {ref.version} in the driver, but {found.package} for {sys.executable}; {fix}"
        )
    return _resolved(found)


class _Driver(DriverManager):  # type: ignore[misc] # stevedore's types are not followed
    """stevedore's driver for an entry point that is already chosen.

    stevedore's own list comes from a cache on disk that can miss a plugin installed within the last minutes and whose
    entry points do not know their distribution.
    """

    def __init__(self, registration: Registration) -> None:
        self._chosen = registration.entry_point
        group = KINDS[registration.kind].group
        super().__init__(namespace=group, name=registration.name)

    def list_entry_points(self) -> list[importlib.metadata.EntryPoint]:
        return [self._chosen]


def _resolved(registration: Registration) -> ResolvedPlugin:
    spec = load_spec(registration, load=lambda: _Driver(registration).driver)
    kind = KINDS[spec.kind]
    if spec.api_version in kind.adapted:
        logger.warning(
            "%s of package %s was written for api_version %d of %s, now %d: %s. Upgrade %s", registration.title,
            registration.package, spec.api_version, spec.kind, kind.api_version, kind.adapted[spec.api_version],
            registration.dist,
        )  # fmt: skip
    return ResolvedPlugin(spec, PluginRef(registration.kind, spec.name, registration.dist, registration.version))


def _select(kind: str, name: str, block: Sequence[str], base_dir: Path) -> Registration:
    installed = registrations()
    matching = [each for each in named(name, installed) if each.kind == kind]
    if not matching:
        raise PluginNotFoundError(_not_found(kind, name, installed, base_dir))
    blocked = block_list(block)
    usable = [each for each in matching if not is_blocked(each, blocked)]
    if not usable:
        raise PluginNotFoundError(
            f"{matching[0].title} of package {matching[0].package} is blocked: take it out of plugins.block "
            f"or {BLOCK_VARIABLE}"
        )
    if len(usable) > 1:
        raise PluginConflictError(conflict_text(usable))
    return usable[0]


def _not_found(kind: str, name: str, installed: list[Registration], base_dir: Path) -> str:
    title = KINDS[kind].title
    package, _, plain = name.rpartition(":")
    if plain.endswith(".py"):
        path = base_dir / name
        defined = top_level_names(path.read_text(encoding="utf-8")) if path.is_file() else []
        examples = " or ".join(f"'{name}:{each}'" for each in defined[:3]) or f"'{name}:object'"
        return f"{title} {name!r} names a file but no object in it: write {examples}"
    of_kind = [each for each in installed if each.kind == kind]
    parts = [f"no {title} {plain!r} is installed" + (f" from package {package!r}" if package else "")]
    elsewhere = sorted({each.dist for each in of_kind if each.name == plain})
    if package and elsewhere:
        parts.append("it comes from " + ", ".join(elsewhere))
    names = sorted({each.name for each in of_kind})
    nearest = _nearest(plain, [*names, *(each for of_kind, each in OFFICIAL if of_kind == kind)])
    if nearest and nearest != plain:
        parts.append(f"did you mean {nearest!r}?")
    if nearest not in names and (kind, nearest) in OFFICIAL:
        package = OFFICIAL[kind, nearest]
        parts.append(f"{nearest!r} comes with: pip install {package} (all plugins: pip install agentrl-all)")
    other = sorted({KINDS[each.kind].title for each in installed if each.name == plain and each.kind in KINDS})
    if other and not elsewhere:
        parts.append(f"{plain!r} is a {' and a '.join(other)}")
    parts.append(f"installed: {', '.join(names)}" if names else f"no {title} is installed at all")
    return "; ".join(parts)


def _nearest(name: str, candidates: list[str]) -> str:
    if name in candidates:
        return name
    return next(iter(difflib.get_close_matches(name, candidates, 1)), "")
