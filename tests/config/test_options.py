"""The list of options: frozen, so that every new key is a visible diff, and documented."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agentrl_core.api import option
from agentrl_core.config import Config, OptionDoc, describe

FROZEN = Path(__file__).with_name("options.txt")
COMMAND = "AGENTRL_REGENERATE=1 pytest tests/config/test_options.py"


def listed() -> str:
    lines = [f"# Every option of a configuration. After an intended change: {COMMAND}"]
    for doc in describe(Config):
        notes = ", ".join(note for note in (doc.unit, doc.bounds) if note)
        lines.append(f"{doc.path}: {doc.type} = {doc.default}" + (f"  ({notes})" if notes else ""))
    return "\n".join(lines) + "\n"


def test_the_options_are_the_frozen_ones():
    if os.environ.get("AGENTRL_REGENERATE"):
        FROZEN.write_text(listed(), encoding="utf-8")
    assert listed() == FROZEN.read_text(encoding="utf-8"), f"if the change is intended, run: {COMMAND}"


@pytest.mark.parametrize("doc", describe(Config), ids=lambda doc: doc.path)
def test_every_option_has_help(doc):
    assert doc.help


@dataclass
class Inner:
    size: int = option(3, ge=1, le=9, unit="entries", help="of the cache")


@dataclass
class Outer:
    key: str = option(help="a password")
    mode: str = option("a", choices=("a", "b"), help="how")
    ratio: float | None = 0.5
    inner: Inner = field(default_factory=Inner)
    many: list[Inner] = field(default_factory=lambda: [Inner(4)])


def test_describe():
    assert describe(Outer) == [
        OptionDoc("key", "str", "required", "a password", "", ""),
        OptionDoc("mode", "str", "a", "how", "", "one of 'a', 'b'"),
        OptionDoc("ratio", "float | null", "0.5", "", "", ""),
        OptionDoc("inner.size", "int", "3", "of the cache", "entries", ">= 1 and <= 9"),
        OptionDoc("many", "list[Inner]", "[{size: 4}]", "", "", ""),
        OptionDoc("many[].size", "int", "3", "of the cache", "entries", ">= 1 and <= 9"),
    ]
