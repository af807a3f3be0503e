"""Which plugins the installed distributions register, read from their metadata without importing anything.

A process reads the metadata once, and again after something was installed, removed or edited.
"""

import difflib
import importlib.metadata
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from packaging.utils import canonicalize_name

from agentrl_core.api.errors import PluginNotFoundError
from agentrl_core.api.plugin import CLI_GROUP, KINDS, RESERVED_GROUPS

logger = logging.getLogger(__name__)

BLOCK_VARIABLE = "AGENTRL_PLUGINS_BLOCK"
"""Environment variable with names or packages that must not be used, separated by commas."""

_ENTRY_POINTS = "entry_points.txt"
_HEADER_FIELD = re.compile(r"^(name|version):[ \t]*(\S.*?)[ \t\r]*$", re.IGNORECASE | re.MULTILINE)
_KIND_OF_GROUP = {kind.group: kind.kind for kind in KINDS.values()}


@dataclass(frozen=True)
class Registration:
    """One entry point of one distribution. ``kind`` is the group's name where no kind has that group."""

    kind: str
    name: str
    dist: str
    version: str
    entry_point: importlib.metadata.EntryPoint

    @property
    def title(self) -> str:
        """For messages: ``tool 'calculator'``."""
        return f"{KINDS[self.kind].title if self.kind in KINDS else self.kind} {self.name!r}"

    @property
    def package(self) -> str:
        """For messages: ``agentrl-tools-basic 0.1.0``."""
        return f"{self.dist} {self.version}".rstrip()


def registrations() -> list[Registration]:
    """All entry points in groups of ours, ordered by kind (as in ``KINDS``), name and distribution."""
    return _registered(lambda group: group in _KIND_OF_GROUP or _is_stray(group))


def registered_in(wanted: str, block: Sequence[str] = ()) -> list[Registration]:
    """Entry points of a group without a kind, such as :data:`CLI_GROUP`; blocked ones are left out."""
    blocked = block_list(block)
    return [each for each in _registered(lambda group: group == wanted) if not is_blocked(each, blocked)]


def named(name: str, installed: Iterable[Registration]) -> list[Registration]:
    """Those that are registered as NAME or package:name."""
    package, _, plain = name.rpartition(":")
    return [each for each in installed if each.name == plain and (not package or same_package(each.dist, package))]


def _registered(wanted: Callable[[str], bool]) -> list[Registration]:
    owner = cache(_name_and_version)
    order = {kind: index for index, kind in enumerate(KINDS)}
    found = [
        Registration(_KIND_OF_GROUP.get(each.group, each.group), each.name, *owner(each.dist), each)
        for each in _entry_points()
        if wanted(each.group)
    ]
    return sorted(found, key=lambda each: (order.get(each.kind, len(order)), each.kind, each.name, each.dist))


def block_list(block: Sequence[str] = ()) -> frozenset[str]:
    """Blocked names and packages: those given and those of ``AGENTRL_PLUGINS_BLOCK``."""
    from_environment = os.environ.get(BLOCK_VARIABLE, "").split(",")
    return frozenset(item.strip() for item in (*block, *from_environment) if item.strip())


def is_blocked(registration: Registration, blocked: Iterable[str]) -> bool:
    """True where an item is the plugin's name, its package, or ``package:name``."""
    for item in blocked:
        package, _, name = item.rpartition(":")
        if package:
            if name == registration.name and same_package(package, registration.dist):
                return True
        elif item == registration.name or same_package(item, registration.dist):
            return True
    return False


def same_package(one: str, other: str) -> bool:
    """Whether two distribution names are the same by the rules of packaging (case, ``-``, ``_``, ``.``)."""
    return canonicalize_name(one) == canonicalize_name(other)


def _is_stray(group: str) -> bool:
    return group.startswith("agentrl.") and group != CLI_GROUP and group not in RESERVED_GROUPS


@dataclass(frozen=True)
class _Read:
    """What was read of the metadata along a path, and when these places were last changed [ns] before that."""

    found: list[importlib.metadata.EntryPoint]
    path: tuple[str, ...]
    places: dict[str, int]

    @property
    def current(self) -> bool:
        return self.path == tuple(sys.path) and all(_changed(place) == then for place, then in self.places.items())


_last: _Read | None = None
SETTLED_NS = 2_000_000_000
"""Where something changed less than this before it was read, it is read again: clocks of file systems are coarse."""


def _changed(place: str) -> int:
    try:
        return os.stat(place or ".").st_mtime_ns
    except OSError:
        return 0


def _entry_points() -> list[importlib.metadata.EntryPoint]:
    global _last
    if _last is not None and _last.current:
        return _last.found
    path, now = tuple(sys.path), time.time_ns()
    places = {place: _changed(place) for place in path}
    found, files = _read()
    places |= {file: _changed(file) for file in files}
    settled = all(then < now - SETTLED_NS for then in places.values())
    _last = _Read(found, path, places) if settled else None
    return found


def _read() -> tuple[list[importlib.metadata.EntryPoint], list[str]]:
    """All entry points in groups of ours, and the files that they stand in."""
    found: list[importlib.metadata.EntryPoint] = []
    files: list[str] = []
    seen = set()
    for dist in importlib.metadata.distributions():
        try:
            text = dist.read_text(_ENTRY_POINTS)
            # Reading hundreds of distributions takes little, parsing them all would not.
            if text is None or "agentrl." not in text:
                continue
            # Those of the package importlib_metadata, which takes the place of Python's own, have it too.
            if (path := getattr(dist, "_path", None)) is not None:
                files.append(str(path / _ENTRY_POINTS))
            name = canonicalize_name(_name_and_version(dist)[0])
            if name not in seen and _is_first_on_path(name, text):
                found.extend(each for each in dist.entry_points if each.group.startswith("agentrl."))
            seen.add(name)
        except Exception as error:  # noqa: BLE001 - damaged metadata may raise anything; the others must stay usable
            logger.warning("cannot read the entry points of %s: %r", getattr(dist, "_path", dist), error)
    return found, files


def _is_first_on_path(name: str, entry_points: str) -> bool:
    """No other distribution of this name comes before on the path, whose modules would be imported instead."""
    try:
        return importlib.metadata.distribution(name).read_text(_ENTRY_POINTS) == entry_points
    except importlib.metadata.PackageNotFoundError:
        # Half removed: its folder has another name than its metadata say.
        return True


def _name_and_version(dist: importlib.metadata.Distribution | None) -> tuple[str, str]:
    try:
        # Not dist.metadata: it parses the whole description.
        text = "" if dist is None else dist.read_text("METADATA") or dist.read_text("PKG-INFO") or ""
        fields = {name.lower(): value for name, value in _HEADER_FIELD.findall(text.partition("\n\n")[0])}
    except Exception:  # noqa: BLE001 - a half-removed distribution raises OSError, a damaged one anything
        fields = {}
    return fields.get("name", "unknown"), fields.get("version", "")


def registrations_named(name: str, kinds: Collection[str] | None = None) -> list[Registration]:
    """All that is registered as NAME or package:name, of these kinds.

    Raises:
        PluginNotFoundError: nothing is; the nearest name is given.
    """
    installed = [each for each in registrations() if kinds is None or each.kind in kinds]
    found = named(name, installed)
    if not found:
        close = difflib.get_close_matches(name.rpartition(":")[2], sorted({each.name for each in installed}), 1)
        hint = f"; did you mean {close[0]!r}? " if close else ". "
        raise PluginNotFoundError(f"no installed plugin is named {name!r}{hint}See: agentrl plugins list")
    return found
