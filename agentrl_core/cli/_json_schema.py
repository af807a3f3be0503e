"""JSON Schema of an option dataclass."""

import types
from typing import Any, Literal, Union, get_args, get_origin

from agentrl_core.api.config import OptionInfo
from agentrl_core.config.introspect import Member, is_section, members
from agentrl_core.config.writing import plain

DRAFT = "https://json-schema.org/draft/2020-12/schema"
_SIMPLE = {bool: "boolean", int: "integer", float: "number", str: "string", types.NoneType: "null"}
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}


def json_schema(config: type) -> dict[str, Any]:
    """Draft 2020-12. Units stand under ``x-unit``."""
    return {"$schema": DRAFT, **_section(config)}


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
    schema = {**schema_of_type(member.type), **limits_of(member.info, member.type), **_words(member.info)}
    if member.default is not None:
        schema["default"] = plain(member.default())
    return schema


def limits_of(info: OptionInfo, hint: Any) -> dict[str, Any]:
    """Choices and bounds; those of a list hold for its elements."""
    bounds = {word: getattr(info, key) for key, word in _BOUNDS.items()}
    schema: dict[str, Any] = {word: bound for word, bound in bounds.items() if bound is not None}
    if info.choices:
        schema["enum"] = list(info.choices)
    if schema and (get_origin(hint) or hint) in (list, tuple):
        return {"items": {**schema_of_type(hint).get("items", {}), **schema}}
    return schema


def _words(info: OptionInfo) -> dict[str, Any]:
    words = {"description": info.help, "x-unit": info.unit}
    return {key: text for key, text in words.items() if text}


def schema_of_type(hint: Any) -> dict[str, Any]:
    """What values of an annotation look like."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    if is_section(hint):
        return _section(hint)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [schema_of_type(argument) for argument in arguments]}
    if origin in (list, tuple) or hint in (list, tuple):
        return {"type": "array", "items": schema_of_type(arguments[0]) if arguments else {}}
    if origin is dict or hint is dict:
        return {"type": "object", "additionalProperties": schema_of_type(arguments[1]) if arguments else {}}
    return {}
