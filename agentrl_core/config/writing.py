"""A configuration as plain containers and as YAML that loads back to the same configuration."""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import yaml

from agentrl_core.config.nodes import Dumper, KeyPath, dotted
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
    text: str = yaml.dump(written(config), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every value below plain containers, with its path; an empty container is a value."""
    if isinstance(value, dict | list) and value:
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(child, (*path, key))
    else:
        yield path, value


def to_commented_yaml(config: Config, comments: Mapping[str, str]) -> str:
    """:func:`to_yaml` with one value a line, and behind it, in one column, the comment of its key path."""
    lines = list(_lines(written(config), (), 0))
    column = min(_MOST_COMMENT_COLUMN, max(len(text) for text, path in lines if path) + 2)
    return "".join(
        f"{text:<{column - 2}}  # {comments[dotted(path)]}\n" if path else f"{text}\n" for text, path in lines
    )


def _lines(value: Any, path: KeyPath, depth: int) -> Iterator[tuple[str, KeyPath]]:
    """Lines of a non-empty container, each with the path of its value; an empty path where it opens a container."""
    indent = "  " * depth
    if isinstance(value, dict):
        for key, child in value.items():
            if isinstance(child, dict | list) and child:
                yield f"{indent}{_flow(key)}:", ()
                yield from _lines(child, (*path, key), depth + 1)
            else:
                yield f"{indent}{_flow(key)}: {_flow(child)}", (*path, key)
        return
    for index, child in enumerate(value):
        if isinstance(child, dict | list) and child:
            (first, first_path), *rest = _lines(child, (*path, index), depth + 1)
            yield f"{indent}- {first.lstrip()}", first_path
            yield from rest
        else:
            yield f"{indent}- {_flow(child)}", (*path, index)


def _flow(value: Any) -> str:
    """A scalar or empty container on one line, whatever is in it."""
    style = '"' if isinstance(value, str) and len(value.splitlines()) > 1 else None
    text: str = yaml.dump(value, Dumper=Dumper, allow_unicode=True, width=sys.maxsize, default_style=style)
    return text.removesuffix("...\n").rstrip("\n")


def escaped(value: Any) -> Any:
    """Values are already resolved: a ``${`` that is still there is meant literally."""
    if isinstance(value, dict):
        return {key: escaped(child) for key, child in value.items()}
    if isinstance(value, list):
        return [escaped(child) for child in value]
    if isinstance(value, str):
        return _INTERPOLATION.sub(lambda match: match[1] * 2 + r"\${", value)
    return value
