"""JSON Schema of a whole configuration file, with the options of every installed plugin.

A file may stand on another one (``extends``) and be completed on the command line, so nothing is required but the name
in a list of plugins. Every value may be an interpolation.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from agentrl_core.api.errors import PluginError
from agentrl_core.api.plugin import KINDS, PluginSpec
from agentrl_core.cli._json_schema import DRAFT, limits_of, schema_of_type
from agentrl_core.config.introspect import Member, element_type, is_section, is_slot, members, union_arms
from agentrl_core.config.schema import Config, Slot
from agentrl_core.config.writing import plain

_INTERPOLATION = {"type": "string", "pattern": r"\$\{", "description": "${key.path} or ${oc.env:NAME}"}
_REFERENCE = {"$ref": "#/$defs/interpolation"}


def config_schema() -> dict[str, Any]:
    """Draft 2020-12. Plugins that are broken or blocked have no options in it."""
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
    """The schema with these plugins: by kind, then by ``package:name``."""
    root = _section(Config)
    root["properties"] = {
        "extends": {"type": "string", "description": "another file that this one is laid over"},
        **root["properties"],
    }
    definitions = {kind: _options_by_name(named) for kind, named in specs.items()}
    return {
        "$schema": DRAFT,
        "title": "agentrl configuration",
        **root,
        "$defs": {"interpolation": _INTERPOLATION, **{f"{kind}.options": each for kind, each in definitions.items()}},
    }


def _section(config: type, left_out: Iterable[str] = ()) -> dict[str, Any]:
    properties = {name: _member(member) for name, member in members(config).items() if name not in left_out}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _member(member: Member) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    if member.info.help:
        schema["description"] = member.info.help
    if member.info.unit:
        schema["x-unit"] = member.info.unit
    if member.default is not None and not is_section(member.type):
        schema["default"] = plain(member.default())
    value = _value(member)
    return {**schema, **value} if value.get("type") == "string" else {**schema, "anyOf": [value, _REFERENCE]}


def _value(member: Member) -> dict[str, Any]:
    (arm, *_) = union_arms(member.type)
    element = element_type(arm)
    if is_slot(arm):
        return _slot(arm, in_list=False)
    if is_slot(element):
        return {"type": "array", "items": _slot(element, in_list=True)}
    if is_section(arm):
        return _section(arm)
    return {**schema_of_type(member.type), **limits_of(member.info, member.type)}


def _slot(slot: type[Slot], in_list: bool) -> dict[str, Any]:
    full = _section(slot, left_out=("config",))
    full["properties"]["config"] = {"description": members(slot)["config"].info.help, "type": ["object", "string"]}
    if in_list:
        full["required"] = ["name"]
    full["allOf"] = [{"$ref": f"#/$defs/{slot.kind}.options"}]
    return {"anyOf": [{"type": "string", "description": f"name of a {KINDS[slot.kind].title}"}, full]}


def _options_by_name(named: Mapping[str, PluginSpec]) -> dict[str, Any]:
    """The options of the plugin that ``name`` names; a name that two packages have allows those of both."""
    plain_names: dict[str, list[PluginSpec]] = {}
    for full, spec in named.items():
        plain_names.setdefault(spec.name, []).append(spec)
        plain_names.setdefault(full, []).append(spec)
    rules = []
    for name, specs in sorted(plain_names.items()):
        schemas = [_options(spec) for spec in specs]
        options = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        condition = {"properties": {"name": {"const": name}}, "required": ["name"]}
        rules.append({"if": condition, "then": {"properties": {"config": {"anyOf": [options, _REFERENCE]}}}})
    return {"allOf": rules} if rules else {}


def _options(spec: PluginSpec) -> dict[str, Any]:
    return {"description": spec.summary, **_section(spec.config)}
