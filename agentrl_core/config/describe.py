"""The list of options of a dataclass, for `agentrl plugins show` and for the documentation."""

from dataclasses import dataclass
from typing import Any, get_origin

import yaml

from agentrl_core.config.introspect import (
    Member,
    allows_none,
    bounds,
    element_type,
    expected,
    is_section,
    is_slot,
    members,
    type_name,
    union_arms,
)
from agentrl_core.config.nodes import Dumper
from agentrl_core.config.writing import plain

REQUIRED = "required"


@dataclass(frozen=True)
class OptionDoc:
    """One key: ``path`` from the dataclass (``tools[].timeout`` in a list), ``default`` as YAML or ``"required"``.

    ``engines.NAME.model`` is a key of each entry of a mapping.
    """

    path: str
    type: str
    default: str
    help: str
    unit: str
    bounds: str


def describe(dataclass_type: type) -> list[OptionDoc]:
    """Every key below an option dataclass, in the order of the fields; of sections only those that may be null."""
    return _described(dataclass_type, "")


def _described(cls: type, prefix: str) -> list[OptionDoc]:
    docs: list[OptionDoc] = []
    for member in members(cls).values():
        (arm, *_) = union_arms(member.type)
        path = f"{prefix}{member.name}"
        if is_section(arm):
            docs += [_document(member, path)] if allows_none(member.type) else []
            docs += _described(arm, f"{path}.")
            continue
        docs.append(_document(member, path))
        if is_section(element_type(arm)):
            docs += _described(element_type(arm), f"{path}.NAME." if get_origin(arm) is dict else f"{path}[].")
    return docs


def _document(member: Member, path: str) -> OptionDoc:
    default = REQUIRED if member.default is None else _yaml(_short(member.type, member.default()))
    info = member.info
    limits = expected(member.type, info) if info.choices else bounds(info)
    return OptionDoc(path, type_name(member.type), default, info.help, info.unit, limits)


def _short(tp: Any, default: Any) -> Any:
    """Slots of a default list by name only."""
    if is_slot(element_type(tp)) and isinstance(default, list):
        return [slot.name for slot in default]
    return plain(default)


def _yaml(value: Any) -> str:
    text: str = yaml.dump(value, Dumper=Dumper, default_flow_style=True, width=1000, allow_unicode=True)
    return text.strip().removesuffix("...").strip()
