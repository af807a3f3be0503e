import asyncio
import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import PluginRequirementError, ToolContext
from agentrl_tools_sandbox.boundary import choose
from agentrl_tools_sandbox.config import PythonConfig
from agentrl_tools_sandbox.python_tool import PythonTool
from agentrl_tools_sandbox.sandbox import trial

REQUIRED = os.environ.get("AGENTRL_TEST_BOUNDARIES", "").split()
"""Boundaries that must work, as in CI: their tests fail instead of being skipped."""


@cache
def reason_against(boundary: str) -> str:
    try:
        choose(PythonConfig(boundary=boundary), trial)
    except PluginRequirementError as error:
        if boundary in REQUIRED:
            raise
        return str(error)
    return ""


@pytest.fixture(scope="session")
def why_not() -> Callable[[str], str]:
    """Says why a boundary does not work here, or ""."""
    return reason_against


@pytest.fixture(params=["sandlock", "bubblewrap", "landlock"])
def confined(request: pytest.FixtureRequest) -> Mapping[str, Any]:
    """Options that choose a boundary; a test runs with each that works here."""
    if reason := reason_against(request.param):
        pytest.skip(reason)
    return {"boundary": request.param}


@pytest.fixture
def any_boundary() -> Mapping[str, Any]:
    """Options that choose a boundary that works here, or none where none does: for tests of what is not security."""
    return {} if not reason_against("auto") else {"unsafe": True}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the directories of sandboxes are made."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def run_code(folder: Path) -> Callable[..., list[str]]:
    """Runs codes one after the other in one trajectory; returns what the model sees."""

    def run(*codes: str, **options: Any) -> list[str]:
        async def main() -> list[str]:
            tool = PythonTool(
                PythonConfig(**{"keep_state": True, "timeout": 60.0, "start_timeout": 60.0, **options}),
                ToolContext("python"),
            )
            try:
                return [(await tool.execute("a", {"code": code})).response.text for code in codes]
            finally:
                await tool.release("a")

        texts = asyncio.run(main())
        assert not list(folder.glob("agentrl-sandbox-*"))
        return texts

    return run
