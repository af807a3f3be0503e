"""A configuration as plain containers and as YAML that loads back to the same configuration."""

import re
from dataclasses import fields, is_dataclass
from typing import Any

import yaml

from agentrl_core.config.nodes import Dumper
from agentrl_core.config.schema import Config

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
    """The whole tree in plain containers, plugin options included."""
    tree: dict[str, Any] = plain(config)
    return tree


def to_yaml(config: Config) -> str:
    """YAML that :func:`load_config` reads back to an equal :class:`Config`; every default is written out."""
    text: str = yaml.dump(_escaped(to_dict(config)), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def _escaped(value: Any) -> Any:
    """Values are already resolved: a ``${`` that is still there is meant literally."""
    if isinstance(value, dict):
        return {key: _escaped(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_escaped(child) for child in value]
    if isinstance(value, str):
        return _INTERPOLATION.sub(lambda match: match[1] * 2 + r"\${", value)
    return value
