"""``plugins.lock.json``: what a run was made with."""

import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path

import agentrl_core
from agentrl_core.api.errors import PluginError
from agentrl_core.api.plugin import KINDS, PluginRef

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Lock:
    """The versions of agentrl-core, of Python, and of every plugin of a run, without its text, in a stable order."""

    agentrl_core: str
    python: str
    plugins: tuple[PluginRef, ...]


def lock_of(refs: Iterable[PluginRef]) -> Lock:
    """The lock of these plugins in this interpreter."""
    plugins = {replace(ref, source="", path="") for ref in refs}
    return Lock(agentrl_core.__version__, platform.python_version(), tuple(sorted(plugins, key=astuple)))


def write_lock(path: Path, refs: Iterable[PluginRef]) -> Lock:
    """Write the lock of these plugins; the file is either the old or the new one, never half of it."""
    lock = lock_of(refs)
    content = {"schema_version": SCHEMA_VERSION, **asdict(lock)}
    for plugin in content["plugins"]:
        del plugin["source"], plugin["path"]
    text = json.dumps(content, indent=2) + "\n"
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)
    return lock


def read_lock(path: Path) -> Lock:
    """Read what :func:`write_lock` wrote.

    Raises:
        PluginError: there is no such file, or it is not a lock file of this version.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema_version"] != SCHEMA_VERSION:
            raise PluginError(
                f"{path} has schema_version {content['schema_version']}, this agentrl-core reads {SCHEMA_VERSION}"
            )
        plugins = tuple(PluginRef(**entry) for entry in content["plugins"])
        texts = [content["agentrl_core"], content["python"], *(value for ref in plugins for value in astuple(ref))]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("names and versions must be texts")
        return Lock(content["agentrl_core"], content["python"], plugins)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise PluginError(f"cannot read the lock file {path}: {type(error).__name__}: {error}") from error


def diff_lock(old: Lock, new: Lock) -> list[str]:
    """One line per difference of version, empty if there is none.

    A patch release of Python is no difference, nor is a plugin that only one of the two has: that is another
    configuration, not another version.
    """
    lines = []
    if old.agentrl_core != new.agentrl_core:
        lines.append(f"agentrl-core: {old.agentrl_core} -> {new.agentrl_core}")
    if _minor(old.python) != _minor(new.python):
        lines.append(f"python: {old.python} -> {new.python}")
    for kind, name in sorted({(plugin.kind, plugin.name) for plugin in old.plugins}):
        before, after = _versions(old, kind, name), _versions(new, kind, name)
        if after and before != after:
            title = KINDS[kind].title if kind in KINDS else kind
            lines.append(f"{title} {name!r}: {before} -> {after}")
    return lines


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _versions(lock: Lock, kind: str, name: str) -> str:
    found = [plugin for plugin in lock.plugins if (plugin.kind, plugin.name) == (kind, name)]
    return " and ".join(f"{plugin.dist} {plugin.version}" for plugin in found)
