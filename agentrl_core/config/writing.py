"""A configuration as plain containers and as YAML that loads back to the same configuration."""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import yaml

from agentrl_core.config.nodes import Dumper, KeyPath, Node, dotted, read_text
from agentrl_core.config.schema import Config

_MOST_COMMENT_COLUMN = 80
_INTERPOLATION = re.compile(r"(\\*)\$\{")


def plain(value: Any) -> Any:
    """Dataclasses as dicts (internal fields left out), tuples as lists, everything else as it is."""
    if is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plain(getattr(value, field.name))
            for field in fields(value)
            if field.init and not field.metadata.get("internal")
        }
    if isinstance(value, dict):
        return {key: plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [plain(child) for child in value]
    return value


def to_dict(config: Config) -> dict[str, Any]:
    """The whole tree in plain containers, plugin options included; ``${oc.env:NAME}`` stands for what it gave."""
    return _with_references(plain(config), config)


def written(config: Config) -> dict[str, Any]:
    """:func:`to_dict` as a file holds it: a ``${`` that is meant literally is escaped."""
    return _with_references(escaped(plain(config)), config)


def _with_references(tree: dict[str, Any], config: Config) -> dict[str, Any]:
    """Values of the environment, which may be passwords, as the references by which they were written."""
    for (*parents, last), (text, value) in config.references.items():
        try:
            parent: Any = tree
            for key in parents:
                parent = parent[key]
            # Somebody may have replaced the value after loading.
            if parent[last] == value:
                parent[last] = text
        except (KeyError, IndexError, TypeError):
            continue
    return tree


def to_yaml(config: Config) -> str:
    """YAML that :func:`load_config` reads back to an equal :class:`Config`; every default is written out."""
    return _dumped(written(config), 120)


def _dumped(tree: Mapping[str, Any], width: int) -> str:
    text: str = yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=width)
    return text


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every value below plain containers or nodes, with its path; an empty container is a value."""
    inner = value.value if isinstance(value, Node) else value
    if isinstance(inner, dict | list) and inner:
        for key, child in inner.items() if isinstance(inner, dict) else enumerate(inner):
            yield from leaves(child, (*path, key))
    else:
        yield path, value


def to_commented_yaml(config: Config, comments: Mapping[str, str]) -> str:
    """:func:`to_yaml` with one value a line, and behind it, in one column, the comment of its key path."""
    return commented(written(config), comments)


def commented(tree: Mapping[str, Any], comments: Mapping[str, str]) -> str:
    """The YAML of plain containers with a comment behind each value whose key path has one."""
    text = _dumped(tree, sys.maxsize)
    paths = {int(leaf.origin.label.removeprefix(":")) - 1: path for path, leaf in leaves(read_text(text))}
    lines = text.splitlines()
    column = min(_MOST_COMMENT_COLUMN, max(len(lines[index]) for index in paths) + 2)
    for index, path in paths.items():
        if comment := comments.get(dotted(path)):
            lines[index] = f"{lines[index]:<{column - 2}}  # {comment}"
    return "\n".join(lines) + "\n"


def escaped(value: Any) -> Any:
    """Values are already resolved: a ``${`` that is still there is meant literally."""
    if isinstance(value, dict):
        return {key: escaped(child) for key, child in value.items()}
    if isinstance(value, list):
        return [escaped(child) for child in value]
    if isinstance(value, str):
        return _INTERPOLATION.sub(lambda match: match[1] * 2 + r"\${", value)
    return value
