"""Every key has a reader: an option that nothing looks at is a promise that nobody keeps."""

import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from agentrl_core.config import schema

CORE = Path(schema.__file__).parents[1]
SOURCES = "\n".join(
    path.read_text(encoding="utf-8")
    for path in CORE.rglob("*.py")
    if path.parent != CORE / "config" or "cross" in path.name
)
SECTIONS = [cls for cls in vars(schema).values() if is_dataclass(cls) and cls.__module__ == schema.__name__]
KEYS = sorted(
    {(cls.__name__, item.name) for cls in SECTIONS for item in fields(cls) if not item.metadata.get("internal")}
)


@pytest.mark.parametrize(("section", "key"), KEYS, ids=lambda value: str(value))
def test_key_has_a_reader(section: str, key: str) -> None:
    # SamplingConfig and chat_template_kwargs travel as dicts, so a quoted name counts too.
    assert re.search(rf"\.{key}\b|[\"']{key}[\"']", SOURCES), f"nothing reads {section}.{key}"
