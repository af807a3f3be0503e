"""Resolves ``${key.path}`` and ``${resolver:…}`` with OmegaConf, value by value, so that every problem is found."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agentrl_core.config.introspect import element_type, is_section, members
from agentrl_core.config.nodes import KeyPath, Node, from_plain, problem
from agentrl_core.config.schema import Config
from agentrl_core.config.writing import plain

_ENVIRONMENT = "oc.env"


class Unresolved:
    """Stands for a value whose interpolation failed; its problem is already known."""


UNRESOLVED = Unresolved()


def interpolated(tree: Node) -> tuple[Node, list[str]]:
    """The tree without interpolations, and the problems of those that failed (their value is ``UNRESOLVED``)."""
    written = {path: leaf for path, leaf in tree.leaves() if isinstance(leaf.value, str) and "${" in leaf.value}
    if not written:
        return tree, []
    problems: list[str] = []
    values: dict[KeyPath, Any] = {}
    for path, leaf in written.items():
        try:
            OmegaConf.create({"value": leaf.value})
        except OmegaConfBaseException as error:
            problems.append(problem(path, leaf.origin, f"interpolation {leaf.value!r}: {_first_line(error)}"))
            values[path] = UNRESOLVED
    root = OmegaConf.create(_with_defaults(Config, _substituted(tree, dict.fromkeys(values), {})))
    for path, leaf in written.items():
        if path in values:
            continue
        try:
            values[path] = _lookup(root, path)
        except (OmegaConfBaseException, RecursionError) as error:
            problems.append(problem(path, leaf.origin, f"interpolation {leaf.value!r}: {_first_line(error)}"))
            values[path] = UNRESOLVED
    secrets = [str(values[path]) for path, leaf in written.items() if _ENVIRONMENT in leaf.value and values[path]]
    references = {
        path: leaf.value
        for path, leaf in written.items()
        if _ENVIRONMENT in leaf.value or any(secret in str(values[path]) for secret in secrets)
    }
    return _substituted(tree, values, references), problems


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0].strip()


def _lookup(root: Any, path: KeyPath) -> Any:
    value = root
    for key in path:
        value = value[key]
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _substituted(node: Node, values: dict[KeyPath, Any], references: Mapping[KeyPath, str], path: KeyPath = ()) -> Node:
    if path in values:
        return replace(from_plain(values[path], node.origin), reference=references.get(path, ""))
    if isinstance(node.value, dict):
        children = {key: _substituted(child, values, references, (*path, key)) for key, child in node.value.items()}
        return replace(node, value=children)
    if isinstance(node.value, list):
        items = [_substituted(child, values, references, (*path, index)) for index, child in enumerate(node.value)]
        return replace(node, value=items)
    return node


def _with_defaults(tp: Any, node: Node) -> Any:
    """Plain containers with the defaults of the schema: an interpolation may name a key that the file leaves out."""
    if isinstance(node.value, list):
        return [_with_defaults(element_type(tp), child) for child in node.value]
    if not is_section(tp) or not isinstance(node.value, dict):
        return node.plain()
    known = members(tp)
    tree = {name: plain(member.default()) for name, member in known.items() if member.default is not None}
    for key, child in node.value.items():
        tree[key] = _with_defaults(known[key].type if key in known else Any, child)
    return tree
