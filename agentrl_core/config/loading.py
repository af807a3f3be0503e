"""From a YAML file, or from dataclasses built in Python, to a checked configuration."""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from agentrl_core.api.errors import ConfigError
from agentrl_core.config.capabilities import Alternatives, installed_with
from agentrl_core.config.cross_checks import Problems, check
from agentrl_core.config.hub import hub_directory, is_hub_name
from agentrl_core.config.interpolation import interpolated
from agentrl_core.config.introspect import found as shown
from agentrl_core.config.merging import absolute, merged, normalised, with_overrides, with_policies
from agentrl_core.config.nodes import DEFAULT, Node, Origin, dotted, from_plain, problem, read_file
from agentrl_core.config.schema import Config, ResolvedConfig
from agentrl_core.config.slots import all_slots
from agentrl_core.config.validation import Resolver, Walker
from agentrl_core.config.writing import leaves, plain, to_dict
from agentrl_core.plugins.resolution import resolve

_EXTENDS = "extends"


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    check_files: bool = True,
    resolver: Resolver | None = None,
    alternatives: Alternatives = installed_with,
) -> ResolvedConfig:
    """Reads, resolves and checks a configuration.

    Args:
        path: a YAML file. ``extends: other.yaml`` at its top lays it over another file.
        overrides: ``key.path=value`` with the value in YAML; list elements by index (``tools.0.config.x=1``).
        check_files: also require that the model and the data files exist.
        resolver: finds the plugins; None: those that are installed.
        alternatives: names the plugins that an error proposes.

    Returns:
        The whole tree. The ``config`` of each slot is an instance of the plugin's own dataclass. Relative paths are
        seen from the file that names them, those in overrides from the working directory; all become absolute.

    Raises:
        ConfigError: with every problem that was found.
    """
    return _loaded(resolver or resolve, path, overrides, check_files, alternatives)[0]


def bind(config: Config, *, check_files: bool = True, resolver: Resolver | None = None) -> ResolvedConfig:
    """A checked copy of a tree that was built in Python, as :func:`load_config` returns it.

    The ``config`` of a slot may be an instance of the plugin's dataclass or a dict. Relative paths are seen from the
    working directory.

    Raises:
        ConfigError: with every problem that was found.
    """
    tree = normalised(Config, from_plain(plain(config), Origin("", Path.cwd())))
    bound = _checked(resolver or resolve, tree, [], "", check_files)[0]
    bound.references = dict(config.references)
    return bound


def load_with_origins(
    path: str | Path, overrides: Sequence[str] = (), resolver: Resolver | None = None
) -> tuple[ResolvedConfig, dict[str, str]]:
    """:func:`load_config` without a look at model and data, and where each value comes from.

    A file that a slot names is not run, so its options are unchecked, and keys are not checked against each other.

    Returns:
        The tree, and by key path of every value ``"default"``, ``"file:line"`` or ``"override 'key=value'"``. Files are
        named as seen from the directory of ``path``.

    Raises:
        ConfigError: with every problem that was found.
    """
    config, origins = _loaded(resolver or partial(resolve, run_files=False), path, overrides, check_files=False)
    values = leaves(to_dict(config))
    return config, {dotted(key): origins[dotted(key)].label if dotted(key) in origins else DEFAULT for key, _ in values}


def _loaded(
    resolver: Resolver,
    path: str | Path,
    overrides: Sequence[str],
    check_files: bool,
    alternatives: Alternatives = installed_with,
) -> tuple[ResolvedConfig, dict[str, Origin]]:
    file = Path(path)
    tree = _read(file, Path(os.path.abspath(file)).parent, ())
    tree, problems = with_overrides(tree, overrides, Path.cwd())
    tree, failed = interpolated(tree)
    return _checked(resolver, normalised(Config, tree), [*problems, *failed], str(path), check_files, alternatives)


def _fetched(config: ResolvedConfig) -> Problems:
    """Put the directory of the cache in place of each model of the hub, last of all: it may be large."""
    models: list[tuple[str, Any, str]] = [
        *((name, getattr(config, name), "path") for name in ("model", "critic", "reference", "teacher")),
        *((f"engines.{name}", slot, "model") for name, slot in config.engines.items()),
    ]
    for name, section, key in models:
        path = getattr(section, key)
        if path is not None and is_hub_name(path):
            try:
                setattr(section, key, hub_directory(path))
            except ConfigError as error:
                yield from ((f"{name}.{key}", each) for each in error.problems)


def _read(file: Path, home: Path, below: tuple[str, ...]) -> Node:
    """The tree of a file over that of the file it extends. ``home``: files are named as seen from there."""
    full = os.path.abspath(file)
    label = os.path.relpath(full, home)
    if full in below:
        chain = " -> ".join(os.path.relpath(name, home) for name in (*below, full))
        raise ConfigError(f"{_EXTENDS}: files extend each other in a circle: {chain}", source=below[0])
    tree = _renewed(read_file(file, label))
    base = tree.value.get(_EXTENDS)
    own = {key: child for key, child in tree.value.items() if key != _EXTENDS}
    tree = normalised(Config, replace(tree, value=own))
    if base is None:
        return tree
    if not isinstance(base.value, str):
        raise ConfigError(problem(_EXTENDS, base.origin, f"expected a file name, found {shown(base.value)}"), full)
    parent = Path(absolute(base.value, base.origin))
    if not parent.is_file():
        raise ConfigError(problem(_EXTENDS, base.origin, f"no such file: {parent}"), source=str(file))
    return merged(Config, _read(parent, home, (*below, full)), tree)


def _renewed(tree: Node) -> Node:
    """The tree of a file with ``rollout.records`` in place of ``trainer.save_rollouts``, which older runs have."""
    trainer = tree.value.get("trainer")
    old = trainer.value.get("save_rollouts") if trainer is not None and isinstance(trainer.value, dict) else None
    # A file that extends another one may have no section of its own.
    rollout = tree.value.get("rollout", Node({}, tree.origin))
    if trainer is None or old is None or not isinstance(old.value, bool) or not isinstance(rollout.value, dict):
        return tree
    kept = {key: child for key, child in trainer.value.items() if child is not old}
    records = {"records": Node("all" if old.value else "none", old.origin), **rollout.value}
    value = {**tree.value, "trainer": replace(trainer, value=kept), "rollout": replace(rollout, value=records)}
    return replace(tree, value=value)


def _checked(
    resolver: Resolver,
    tree: Node,
    problems: list[str],
    source: str,
    check_files: bool,
    alternatives: Alternatives = installed_with,
) -> tuple[ResolvedConfig, dict[str, Origin]]:
    tree = with_policies(tree)
    walker = Walker(resolver, _blocked(tree))
    config = walker.section(ResolvedConfig, tree, ())
    problems = [*problems, *walker.problems]
    if not problems and not any(slot.plugin.spec.config is dict for slot in all_slots(config)):
        found = list(check(config, check_files, alternatives)) or list(_fetched(config) if check_files else ())
        problems = [problem(key, walker.origins.get(key), message) for key, message in found]
    if problems:
        raise ConfigError(problems, source)
    checked: ResolvedConfig = config
    checked.references = walker.references
    return checked, walker.origins


def _blocked(tree: Node) -> list[str]:
    """``plugins.block``, needed before the tree is checked."""
    plugins: Any = tree.plain().get("plugins")
    block = plugins.get("block") if isinstance(plugins, dict) else None
    return [name for name in block if isinstance(name, str)] if isinstance(block, list) else []
