"""Walking over the plugins of a configuration."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from agentrl_core.config.schema import Slot


def all_slots(section: Any) -> Iterator[Slot]:
    """Every slot in a section of a configuration, in the order of the schema."""
    if isinstance(section, Slot):
        yield section
    elif isinstance(section, list):
        for item in section:
            yield from all_slots(item)
    elif is_dataclass(section):
        for item in fields(section):
            yield from all_slots(getattr(section, item.name))
