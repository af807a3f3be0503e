"""Resolves ``${key.path}`` and ``${resolver:…}`` with OmegaConf, value by value, so that every problem is found."""

from dataclasses import replace
from functools import reduce
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agentrl_core.config.introspect import element_type, is_section, members, union_arms
from agentrl_core.config.nodes import KeyPath, Node, from_plain, problem
from agentrl_core.config.schema import Config
from agentrl_core.config.writing import leaves, plain

_ENVIRONMENT = "oc.env"


class Unresolved:
    """Stands for a value whose interpolation failed; its problem is already known."""


UNRESOLVED = Unresolved()


def interpolated(tree: Node) -> tuple[Node, list[str]]:
    """Resolve the interpolations of a tree, in place.

    Returns:
        The tree, and the problems of interpolations that failed (their value is ``UNRESOLVED``).
    """
    written = {path: leaf for path, leaf in leaves(tree) if isinstance(leaf.value, str) and "${" in leaf.value}
    problems: list[str] = []
    values: dict[KeyPath, Any] = {}

    def fail(path: KeyPath, leaf: Node, error: BaseException) -> None:
        reason = str(error).splitlines()[0].strip()
        problems.append(problem(path, leaf.origin, f"interpolation {leaf.value!r}: {reason}"))
        values[path] = UNRESOLVED

    for path, leaf in written.items():
        try:
            OmegaConf.create({"value": leaf.value})
        except OmegaConfBaseException as error:
            fail(path, leaf, error)
            _put(tree, path, replace(leaf, value=None))
    root = OmegaConf.create(_with_defaults(Config, tree)) if written else None
    for path, leaf in written.items():
        try:
            values[path] = values[path] if path in values else _lookup(root, path)
        except (OmegaConfBaseException, RecursionError) as error:
            fail(path, leaf, error)
    secrets = [str(values[path]) for path, leaf in written.items() if _ENVIRONMENT in leaf.value and values[path]]
    for path, leaf in written.items():
        is_secret = _ENVIRONMENT in leaf.value or any(secret in str(values[path]) for secret in secrets)
        _put(tree, path, replace(from_plain(values[path], leaf.origin), reference=leaf.value if is_secret else ""))
    return tree, problems


def _put(tree: Node, path: KeyPath, node: Node) -> None:
    reduce(lambda parent, key: parent.value[key], path[:-1], tree).value[path[-1]] = node


def _lookup(root: Any, path: KeyPath) -> Any:
    value = root
    for key in path:
        value = value[key]
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _with_defaults(tp: Any, node: Node) -> Any:
    """Plain containers with the defaults of the schema: an interpolation may name a key that the file leaves out."""
    if isinstance(node.value, list):
        return [_with_defaults(element_type(tp), child) for child in node.value]
    (arm, *others) = union_arms(tp)
    if others or not is_section(arm) or not isinstance(node.value, dict):
        return node.plain()
    known = members(arm)
    tree = {name: plain(member.default()) for name, member in known.items() if member.default is not None}
    for key, child in node.value.items():
        tree[key] = _with_defaults(known[key].type if key in known else Any, child)
    return tree
