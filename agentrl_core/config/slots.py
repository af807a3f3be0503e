"""Walking over the plugins of a configuration."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from agentrl_core.config.schema import Slot


def all_slots(section: Any) -> Iterator[Slot]:
    """Every slot in a section of a configuration, in the order of the schema."""
    return (slot for _, slot in slots_by_path(section))


def slots_by_path(section: Any, path: str = "") -> Iterator[tuple[str, Slot]]:
    """The same, each after its key path (``rollout.agent.loops.0``)."""
    if isinstance(section, Slot):
        yield path, section
    elif isinstance(section, list | dict):
        for key, item in enumerate(section) if isinstance(section, list) else section.items():
            yield from slots_by_path(item, f"{path}.{key}")
    elif is_dataclass(section):
        for field in fields(section):
            yield from slots_by_path(getattr(section, field.name), f"{path}.{field.name}".lstrip("."))
