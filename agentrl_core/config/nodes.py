"""A configuration as it was written: values that know the file and line they come from."""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from agentrl_core.api.errors import ConfigError

_EXPONENT = re.compile(r"^[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")
_FLOAT_TAG = "tag:yaml.org,2002:float"
_BREAKS = frozenset("\n\x85\u2028\u2029")
"""Line breaks to YAML 1.1: double quotes keep them, and keep the text on one line."""
_TIMESTAMP_TAG = "tag:yaml.org,2002:timestamp"

_MOST_VALUES = 100_000
"""Far more than a configuration has; a few nested aliases can stand for billions."""
MOST_LEVELS = 64
"""Libraries that read or write a configuration fail beyond some hundred."""

KeyPath = tuple[str | int, ...]

DEFAULT = "default"
"""Label of the origin of defaults."""


@dataclass(frozen=True)
class Origin:
    """Where a value was written: ``label`` for messages, ``base_dir`` for its relative paths."""

    label: str
    base_dir: Path
    is_override: bool = False


@dataclass(frozen=True)
class Node:
    """A scalar, a ``dict[key, Node]`` or a ``list[Node]``, and where it was written."""

    value: Any
    origin: Origin
    reference: str = ""
    """The text with ``${oc.env:…}`` that gave the value."""

    def plain(self) -> Any:
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value


def from_plain(value: Any, origin: Origin) -> Node:
    """Nodes for plain containers, all with one origin."""
    if isinstance(value, dict):
        return Node({key: from_plain(child, origin) for key, child in value.items()}, origin)
    if isinstance(value, list):
        return Node([from_plain(child, origin) for child in value], origin)
    return Node(value, origin)


def dotted(path: KeyPath) -> str:
    return ".".join(str(key) for key in path)


def problem(path: KeyPath | str, origin: Origin | None, message: str) -> str:
    """One complete message: key path, place, what is wrong."""
    name = path if isinstance(path, str) else dotted(path)
    place = f" ({origin.label})" if origin is not None and origin.label else ""
    return f"{name}{place}: {message}"


class _Loader(yaml.SafeLoader):
    """YAML 1.1, except that ``1e-4`` is a number and ``2026-01-31`` a string."""


class Dumper(yaml.SafeDumper):
    """Quotes what :class:`_Loader` would not read as a string."""


# PyYAML keeps the resolvers in a table shared with its base class; each class gets its own copy.
for _class in (_Loader, Dumper):
    _class.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP_TAG]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _class.add_implicit_resolver(_FLOAT_TAG, _EXPONENT, list("-+.0123456789"))


def _represent_text(dumper: Dumper, text: str) -> yaml.ScalarNode:
    style = '"' if _BREAKS & set(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


Dumper.add_representer(str, _represent_text)


def read_file(path: Path, label: str) -> Node:
    """The root mapping of a YAML file; an empty file is an empty mapping.

    Raises:
        ConfigError: no such file, not UTF-8, not YAML, a key twice in one mapping, not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"no such file: {path}", source=str(path)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{label}: cannot be read as UTF-8 text: {error}", source=str(path)) from error
    origin = Origin(label, Path(os.path.abspath(path)).parent)
    root = _Reader(text, origin, with_lines=True).read(source=str(path))
    if root.value is None:
        return Node({}, origin)
    if not isinstance(root.value, dict):
        raise ConfigError(f"{label}: expected a mapping of sections, found {type(root.value).__name__}", str(path))
    return replace(root, origin=origin)


def read_text(text: str) -> Node:
    """Any YAML document; the labels of its origins are ``:1`` and so on, the numbers of lines."""
    return _Reader(text, Origin("", Path()), with_lines=True).read(source="")


def read_value(text: str, origin: Origin) -> Node:
    """The value of an override, read as YAML.

    Raises:
        ConfigError: not YAML.
    """
    return _Reader(text, origin, with_lines=False).read(source="")


class _Reader:
    """Turns one YAML document into nodes, collecting its problems."""

    def __init__(self, text: str, origin: Origin, with_lines: bool) -> None:
        self._text = text
        self._origin = origin
        self._with_lines = with_lines
        self._problems: list[str] = []
        self._flattened: set[int] = set()
        self._count = 0

    def read(self, source: str) -> Node:
        loader: Any = None
        try:
            loader = _Loader(self._text)
            root = loader.get_single_node()
            node = Node(None, self._origin) if root is None else self._node(loader, root, self._at(root), ())
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            place = f"{self._origin.label}:{mark.line + 1}" if mark and self._with_lines else self._origin.label
            reason = getattr(error, "problem", None) or str(error)
            raise ConfigError(f"{place}: not valid YAML: {reason}", source) from error
        except (RecursionError, ValueError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise ConfigError(f"{self._origin.label}: cannot be read: {reason}", source) from error
        finally:
            if loader is not None:
                loader.dispose()
        if self._problems:
            raise ConfigError(self._problems, source)
        return node

    def _at(self, node: yaml.Node) -> Origin:
        if not self._with_lines:
            return self._origin
        return replace(self._origin, label=f"{self._origin.label}:{node.start_mark.line + 1}")

    def _node(self, loader: _Loader, node: yaml.Node, origin: Origin, parents: tuple[int, ...]) -> Node:
        self._count += 1
        if self._count > _MOST_VALUES:
            raise yaml.YAMLError(f"more than {_MOST_VALUES} values; do aliases (*name) repeat others that repeat more?")
        if id(node) in parents:
            raise yaml.YAMLError("an alias that contains itself")
        if len(parents) > MOST_LEVELS:
            raise yaml.YAMLError(f"nested too deeply: more than {MOST_LEVELS} levels")
        parents = (*parents, id(node))
        if isinstance(node, yaml.MappingNode):
            return Node(self._entries(loader, node, parents), origin)
        if isinstance(node, yaml.SequenceNode):
            return Node([self._node(loader, child, self._at(child), parents) for child in node.value], origin)
        return Node(loader.construct_object(node, deep=True), origin)

    def _entries(self, loader: _Loader, node: yaml.MappingNode, parents: tuple[int, ...]) -> dict[Any, Node]:
        if id(node) not in self._flattened:
            self._flattened.add(id(node))
            self._check_keys(node)
            loader.flatten_mapping(node)
        return {
            loader.construct_object(key, deep=True): self._node(loader, value, self._at(key), parents)
            for key, value in node.value
            if isinstance(key, yaml.ScalarNode)
        }

    def _check_keys(self, node: yaml.MappingNode) -> None:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:null":
                self._problems.append(f"{self._at(key).label}: expected text as a key, found {key.tag}")
                continue
            if key.value in lines:
                message = f"duplicate key in one section, first used in line {lines[key.value]}"
                self._problems.append(problem(key.value, self._at(key), message))
            lines.setdefault(key.value, key.start_mark.line + 1)
