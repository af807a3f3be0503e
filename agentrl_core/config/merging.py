"""Lays one tree over another: a file over the one it extends, an override over the file.

Mappings are merged, everything else is replaced. A slot that gets another name loses its old ``config``, because
those options belong to another plugin.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl_core.api.config import OptionInfo
from agentrl_core.api.errors import ConfigError
from agentrl_core.config.hub import is_hub_name
from agentrl_core.config.introspect import (
    NO_INFO,
    element_type,
    found,
    is_section,
    is_slot,
    member_of,
    members,
    union_arms,
)
from agentrl_core.config.nodes import DEFAULT, MOST_LEVELS, Node, Origin, dotted, from_plain, problem, read_value
from agentrl_core.config.schema import Config, PolicyConfig
from agentrl_core.config.writing import plain


def normalised(tp: Any, node: Node, info: OptionInfo = NO_INFO) -> Node:
    """The same tree with every slot as a mapping and every path absolute."""
    (arm, *others) = union_arms(tp)
    if others:
        return node
    if isinstance(node.value, str):
        if is_slot(arm):
            return Node({"name": node}, node.origin)
        return replace(node, value=located(node.value, node.origin, info)) if info.path else node
    if isinstance(node.value, list):
        return replace(node, value=[normalised(element_type(arm), child, info) for child in node.value])
    if isinstance(node.value, dict) and (is_section(arm) or is_section(element_type(arm))):
        entries = {key: (member_of(arm, key), child) for key, child in node.value.items()}
        return replace(node, value={k: normalised(member.type, c, member.info) for k, (member, c) in entries.items()})
    return node


def absolute(path: str, origin: Origin) -> str:
    """A relative path seen from where it was written; interpolations and URLs are left alone."""
    if not path or "${" in path or "://" in path:
        return path
    return os.path.abspath(origin.base_dir / Path(path).expanduser())


def located(path: str, origin: Origin, info: OptionInfo) -> str:
    """The :func:`absolute` path of an option; a model of the hub stays as it is where there is no such directory."""
    full = absolute(path, origin)
    return path if info.hub and is_hub_name(path) and not os.path.isdir(full) else full


def with_policies(tree: Node) -> Node:
    """The tree with the sections of each policy laid over those of the whole run, for the policies that have some."""
    policies = tree.value.get("policies")
    if policies is None or not isinstance(policies.value, dict):
        return tree
    model = tree.value.get("model")
    over = {name: tree.value.get(name) for name in ("actor", "algorithm")}
    over["adapter"] = model.value.get("adapter") if model is not None and isinstance(model.value, dict) else None
    found = {}
    for name, policy in policies.value.items():
        entries = dict(policy.value) if isinstance(policy.value, dict) else policy.value
        for section, base in over.items() if isinstance(entries, dict) else ():
            own = entries.get(section)
            # With null there, nothing differs.
            if own is not None and own.value is not None:
                entries[section] = merged(member_of(PolicyConfig, section).type, base, own)
        found[name] = replace(policy, value=entries)
    return replace(tree, value={**tree.value, "policies": replace(policies, value=found)})


def merged(tp: Any, base: Node | None, own: Node) -> Node:
    """``own`` over ``base``; both normalised."""
    if base is None or not isinstance(base.value, dict) or not isinstance(own.value, dict):
        return own
    (arm, *_) = union_arms(tp)
    if is_slot(arm) and "name" in own.value:
        base = _for_name(arm, base, own.value["name"])
    entries = dict(base.value)
    for key, child in own.value.items():
        entries[key] = merged(member_of(tp, key).type, entries.get(key), child)
    return Node(entries, own.origin)


def _for_name(tp: Any, slot: Node, name: Node) -> Node:
    """The slot without the options that were written for a plugin of another name."""
    default = members(tp)["name"].default
    old = slot.value["name"].value if "name" in slot.value else default and default()
    if old == name.value or "config" not in slot.value:
        return slot
    entries = {key: child for key, child in slot.value.items() if key != "config"}
    kept = _overridden(slot.value["config"])
    return replace(slot, value=entries if kept is None else {**entries, "config": kept})


def _overridden(node: Node) -> Node | None:
    """What overrides wrote into the tree: `x.config.a=1 x.name=new` must not depend on its order."""
    if not isinstance(node.value, dict):
        return node if node.origin.is_override else None
    kept = {key: child for key in node.value if (child := _overridden(node.value[key])) is not None}
    return replace(node, value=kept) if kept else None


def with_overrides(tree: Node, overrides: Sequence[str], base_dir: Path) -> tuple[Node, list[str]]:
    """The tree after ``path=value`` overrides, in order, and the problems of those that could not be applied."""
    problems: list[str] = []
    for text in overrides:
        origin = Origin(f"override '{text}'", base_dir, is_override=True)
        key, equals, value = text.partition("=")
        keys = tuple(key.strip().split("."))
        if not equals or not all(keys) or len(keys) > MOST_LEVELS:
            limit = f" with at most {MOST_LEVELS} keys" if len(keys) > MOST_LEVELS else ""
            problems.append(f"{origin.label}: expected key.path=value{limit}")
            continue
        try:
            tree = _overlaid(Config, NO_INFO, tree, keys, 0, read_value(value, origin))
        except ConfigError as error:
            problems.extend(error.problems)
    return tree, problems


def _overlaid(tp: Any, info: OptionInfo, node: Node | None, keys: tuple[str, ...], depth: int, value: Node) -> Node:
    if depth == len(keys):
        return merged(tp, node, normalised(tp, value, info))
    node = node if node is not None else Node({}, value.origin)
    key = keys[depth]
    if isinstance(node.value, list):
        index = _index(node, keys, depth, value.origin)
        children = list(node.value)
        children[index] = _overlaid(element_type(tp), info, children[index], keys, depth + 1, value)
        return replace(node, value=children)
    if not isinstance(node.value, dict):
        message = f"{dotted(keys[:depth])} is {found(node.value)}, which has no keys of its own"
        raise ConfigError(problem(keys, value.origin, message))
    member = member_of(tp, key)
    child = node.value.get(key)
    nowhere = replace(value.origin, label=DEFAULT, is_override=False)
    if child is None and member.default is not None and isinstance(default := member.default(), list):
        child = normalised(member.type, from_plain(plain(default), nowhere), member.info)
    child = _overlaid(member.type, member.info, child, keys, depth + 1, value)
    (arm, *_) = union_arms(tp)
    if is_slot(arm) and keys[depth:] == ("name",):
        node = _for_name(arm, node, child)
    return replace(node, value={**node.value, key: child})


def _index(node: Node, keys: tuple[str, ...], depth: int, origin: Origin) -> int:
    size = len(node.value)
    if not keys[depth].isdecimal() or int(keys[depth]) >= size:
        allowed = f"0 to {size - 1}" if size else "none, the list is empty"
        where = dotted(keys[:depth])
        message = f"'{keys[depth]}' is no index of {where}; allowed: {allowed} (or set the whole list: {where}=[…])"
        raise ConfigError(problem(keys, origin, message))
    return int(keys[depth])
