"""What plugins may import is frozen: a change is a visible diff and needs a changelog fragment (CONTRIBUTING.md)."""

import importlib
import os
import pkgutil
from pathlib import Path
from types import ModuleType

import agentrl_core.api
import agentrl_core.engine_kit
import agentrl_testing
from agentrl_core.api import KINDS

FROZEN = Path(__file__).with_name("public_names.txt")
COMMANDS = ("agentrl_testing.cli", "agentrl_testing.devtools")
"""Plugins import nothing of them."""
COMMAND = "AGENTRL_REGENERATE=1 pytest tests/api/test_public_names.py"


def names(module: ModuleType) -> list[str]:
    """``__all__``, or what the module itself defines without an underscore."""
    own = getattr(module, "__all__", None)
    if own is None:
        own = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        ]
    return [f"{module.__name__}.{name}" for name in sorted(own)]


def listed() -> str:
    lines = [f"# What plugins may import. After an intended change: {COMMAND}, and a changelog fragment"]
    lines += [f"{kind.kind} api_version {kind.api_version}" for kind in KINDS.values()]
    lines += names(agentrl_core.api)
    for package in (agentrl_core.engine_kit, agentrl_testing):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.startswith(COMMANDS):
                lines += names(importlib.import_module(found.name))
    return "\n".join(dict.fromkeys(lines)) + "\n"


def test_the_public_names_are_the_frozen_ones() -> None:
    if os.environ.get("AGENTRL_REGENERATE"):
        FROZEN.write_text(listed(), encoding="utf-8")
    assert listed() == FROZEN.read_text(encoding="utf-8"), (
        f"if the change is intended, run: {COMMAND}, and add a fragment to changelog.d/"
    )


def test_every_public_name_exists() -> None:
    missing = [name for name in agentrl_core.api.__all__ if not hasattr(agentrl_core.api, name)]
    assert missing == []
