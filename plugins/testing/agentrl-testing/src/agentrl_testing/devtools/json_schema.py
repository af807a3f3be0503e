"""JSON Schema (draft 2020-12) of a plugin's options, and of a whole configuration file with all plugins' options.

A configuration file may extend another one (``extends``) and be completed on the command line, so its only required key
is the name in a list of plugins. Every value may be an interpolation.
"""

from collections.abc import Iterable, Mapping
from typing import Any, get_origin

from agentrl_core.api.config import OptionInfo
from agentrl_core.api.errors import PluginError
from agentrl_core.api.json_types import json_type
from agentrl_core.api.plugin import KINDS, PluginSpec
from agentrl_core.config.introspect import Member, allows_none, element_type, is_section, is_slot, members, union_arms
from agentrl_core.config.schema import Config
from agentrl_core.config.slots import Slot
from agentrl_core.config.writing import plain

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_INTERPOLATION = {"type": "string", "pattern": r"\$\{", "description": "${key.path} or ${oc.env:NAME}"}
_REFERENCE = {"$ref": "#/$defs/interpolation"}


def json_schema(config: type) -> dict[str, Any]:
    """The schema of a plugin's options, with units under ``x-unit``."""
    return {"$schema": _DRAFT, **_options(config)}


def _options(config: type) -> dict[str, Any]:
    found = members(config)
    properties = {name: {**_type(member), **_words(member)} for name, member in found.items()}
    required = [name for name, member in found.items() if member.default is None]
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": required} if required else schema


def _type(member: Member) -> dict[str, Any]:
    """Type, choices and bounds; a list's choices and bounds apply to its elements."""
    try:
        schema = json_type(member.type, _options)
    except TypeError:
        schema = {}
    limits = _limits(member.info)
    if limits and (get_origin(member.type) or member.type) in (list, tuple):
        return {**schema, "items": {**schema.get("items", {}), **limits}}
    return {**schema, **limits}


def _limits(info: OptionInfo) -> dict[str, Any]:
    limits = {word: getattr(info, key) for key, word in _BOUNDS.items()}
    limits["enum"] = list(info.choices) or None
    return {word: limit for word, limit in limits.items() if limit is not None}


def _words(member: Member) -> dict[str, Any]:
    texts = {"description": member.info.help, "x-unit": member.info.unit}
    words: dict[str, Any] = {key: text for key, text in texts.items() if text}
    return words if member.default is None else {**words, "default": plain(member.default())}


def config_schema() -> dict[str, Any]:
    """The schema of a configuration file, without the options of broken or blocked plugins."""
    from agentrl_core.plugins.registration import block_list, is_blocked, registrations
    from agentrl_core.plugins.spec import load_spec

    blocked = block_list(())
    specs: dict[str, dict[str, PluginSpec]] = {kind: {} for kind in KINDS}
    for each in registrations():
        if is_blocked(each, blocked) or each.kind not in KINDS:
            continue
        try:
            spec = load_spec(each)
        except PluginError:
            continue
        specs[each.kind][f"{each.dist}:{each.name}"] = spec
    return schema_of(specs)


def schema_of(specs: Mapping[str, Mapping[str, PluginSpec]]) -> dict[str, Any]:
    """The schema of a configuration file with these plugins: by kind, then by ``package:name``."""
    root = _section(Config)
    root["properties"] = {
        "extends": {"type": "string", "description": "another file that this one extends and overrides"},
        **root["properties"],
    }
    definitions = {f"{kind}.options": _options_by_name(named) for kind, named in specs.items()}
    return {
        "$schema": _DRAFT,
        "title": "agentrl configuration",
        **root,
        "$defs": {"interpolation": _INTERPOLATION, **definitions},
    }


def _section(config: type, left_out: Iterable[str] = ()) -> dict[str, Any]:
    properties = {name: _member(member) for name, member in members(config).items() if name not in left_out}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _member(member: Member) -> dict[str, Any]:
    words, value = _words(member), _value(member)
    if is_section(member.type):
        words.pop("default", None)
    any_text = value.get("type") == "string" and "enum" not in value
    return {**words, **value} if any_text else {**words, "anyOf": [value, _REFERENCE]}


def _value(member: Member) -> dict[str, Any]:
    (arm, *_) = union_arms(member.type)
    element = element_type(arm)
    if is_slot(arm):
        slot = _slot(arm, in_list=False)
        return {"anyOf": [*slot["anyOf"], {"type": "null"}]} if allows_none(member.type) else slot
    if is_slot(element) and get_origin(arm) is dict:
        return {"type": "object", "additionalProperties": _slot(element, in_list=False)}
    if is_slot(element):
        return {"type": "array", "items": _slot(element, in_list=True)}
    if not is_section(arm):
        return _type(member)
    return {"anyOf": [_section(arm), {"type": "null"}]} if allows_none(member.type) else _section(arm)


def _slot(slot: type[Slot], in_list: bool) -> dict[str, Any]:
    full = _section(slot, left_out=("config",))
    full["properties"]["config"] = {"description": members(slot)["config"].info.help, "type": ["object", "string"]}
    if in_list:
        full["required"] = ["name"]
    full["allOf"] = [{"$ref": f"#/$defs/{slot.kind}.options"}]
    return {"anyOf": [{"type": "string", "description": f"name of a {KINDS[slot.kind].title}"}, full]}


def _options_by_name(named: Mapping[str, PluginSpec]) -> dict[str, Any]:
    """The options of each plugin by its name; a name that two packages use allows the options of both."""
    plain_names: dict[str, list[PluginSpec]] = {}
    for full, spec in named.items():
        plain_names.setdefault(spec.name, []).append(spec)
        plain_names.setdefault(full, []).append(spec)
    rules = []
    for name, specs in sorted(plain_names.items()):
        schemas = [{"description": spec.summary, **_section(spec.config)} for spec in specs]
        options = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        condition = {"properties": {"name": {"const": name}}, "required": ["name"]}
        rules.append({"if": condition, "then": {"properties": {"config": {"anyOf": [options, _REFERENCE]}}}})
    return {"allOf": rules} if rules else {}
