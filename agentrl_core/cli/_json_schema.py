"""JSON Schema of an option dataclass."""

import types
from typing import Any, Literal, Union, get_args, get_origin

from agentrl_core.api.config import OptionInfo
from agentrl_core.config.introspect import Member, is_section, members
from agentrl_core.config.writing import plain

_SIMPLE = {bool: "boolean", int: "integer", float: "number", str: "string", types.NoneType: "null"}
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def json_schema(config: type) -> dict[str, Any]:
    """Draft 2020-12. Units stand under ``x-unit``."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_section(config)}


def _section(config: type) -> dict[str, Any]:
    found = members(config)
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _member(member) for name, member in found.items()},
        "additionalProperties": False,
    }
    required = [name for name, member in found.items() if member.default is None]
    return {**schema, "required": required} if required else schema


def _member(member: Member) -> dict[str, Any]:
    schema = {**_type(member.type), **_limits(member.info)}
    if member.default is not None:
        schema["default"] = plain(member.default())
    return schema


def _limits(info: OptionInfo) -> dict[str, Any]:
    bounds = {word: getattr(info, key) for key, word in _BOUNDS.items()}
    schema: dict[str, Any] = {word: bound for word, bound in bounds.items() if bound is not None}
    if info.choices:
        schema["enum"] = list(info.choices)
    if info.help:
        schema["description"] = info.help
    if info.unit:
        schema["x-unit"] = info.unit
    return schema


def _type(hint: Any) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    if is_section(hint):
        return _section(hint)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_type(argument) for argument in arguments]}
    if origin in (list, tuple) or hint in (list, tuple):
        return {"type": "array", "items": _type(arguments[0]) if arguments else {}}
    if origin is dict or hint is dict:
        return {"type": "object", "additionalProperties": _type(arguments[1]) if arguments else {}}
    return {}
