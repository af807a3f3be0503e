"""The environment of an engine: what is installed, from where, and what is told where that fails."""

import importlib.metadata
import json
import shutil
import sys
from pathlib import Path

import pytest

from agentrl_core.api.errors import EngineError, PluginError
from agentrl_core.plugins.resolution import ResolvedPlugin, resolve
from agentrl_engines import environment
from agentrl_engines.environment import setup_commands, setup_environment
from agentrl_testing.plugins import IsolatedPlugins, isolated_plugins

__all__ = ["isolated_plugins"]

SPEC = """
from agentrl_core.api import PluginSpec
PLUGIN = PluginSpec(kind="engine", name="acme", api_version=1, summary="for tests", factory="acme_engine.engine:Engine",
                    requires=("acme-server>=2",))
"""
RAY = importlib.metadata.version("ray")


@pytest.fixture
def acme(isolated_plugins: IsolatedPlugins, monkeypatch: pytest.MonkeyPatch) -> ResolvedPlugin:
    """An engine from a package index."""
    modules = {"acme_engine/plugin.py": SPEC}
    isolated_plugins.add("acme-engine", {"agentrl.engines": {"acme": "acme_engine.plugin:PLUGIN"}}, modules=modules)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    return resolve("engine", "acme")


def origin(isolated_plugins: IsolatedPlugins, dist: str, content: dict[str, object]) -> None:
    (info,) = isolated_plugins.path.glob(f"{dist}-*.dist-info")
    (info / "direct_url.json").write_text(json.dumps(content), encoding="utf-8")


def requirements(plugin: ResolvedPlugin, *extra: str) -> list[str]:
    make, install = setup_commands(plugin, Path("/env"), extra)
    assert make == [sys.executable, "-m", "venv", "/env"]
    assert install[:4] == ["/env/bin/python", "-m", "pip", "install"]
    return install[4:]


def test_the_same_versions_as_here_and_what_the_engine_requires(acme: ResolvedPlugin) -> None:
    wanted = requirements(acme, "acme-server==2.5")
    assert wanted[-4:] == ["acme-engine==0.1.0", f"ray=={RAY}", "acme-server>=2", "acme-server==2.5"]


def test_what_was_installed_from_a_folder_comes_from_there(
    acme: ResolvedPlugin, isolated_plugins: IsolatedPlugins
) -> None:
    origin(isolated_plugins, "acme_engine", {"url": "file:///my%20plugins/acme", "dir_info": {}})
    assert "/my plugins/acme" in requirements(acme)
    origin(isolated_plugins, "acme_engine", {"url": "file:///acme", "dir_info": {"editable": True}})
    wanted = requirements(acme)
    assert wanted[wanted.index("/acme") - 1] == "--editable"


def test_pins_of_the_package_are_constraints(acme: ResolvedPlugin, isolated_plugins: IsolatedPlugins) -> None:
    pins = isolated_plugins.path / "acme_engine" / "environment.txt"
    pins.write_text("acme-server==2.1\n", encoding="utf-8")
    assert requirements(acme)[:2] == ["--constraint", str(pins)]


def test_uv_is_used_where_there_is_one(acme: ResolvedPlugin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    make, install = setup_commands(acme, Path("/env"))
    assert make == ["/bin/uv", "venv", "--allow-existing", "--python", sys.executable, "/env"]
    assert install[:5] == ["/bin/uv", "pip", "install", "--python", "/env/bin/python"]


def test_engines_of_the_trainers_own_environment_need_none() -> None:
    with pytest.raises(PluginError, match="inference engine 'hf' runs in the trainer's own environment"):
        setup_commands(resolve("engine", "hf"), Path("/env"))


def test_a_command_that_fails_is_named(acme: ResolvedPlugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(environment, "setup_commands", lambda *_: [["true"], ["false", "-x"], ["true"]])
    with pytest.raises(EngineError, match=r"^false -x failed with exit code 1 \(its output is above\)\. Fix the cause"):
        setup_environment(acme, tmp_path, report=commands.append)
    assert commands == [["true"], ["false", "-x"]]


def test_an_environment_that_cannot_serve_is_told(
    acme: ResolvedPlugin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    monkeypatch.setattr(environment, "setup_commands", lambda *_: [["true"]])
    with pytest.raises(Exception, match=f"{python} has no agentrl-core"):
        setup_environment(acme, tmp_path)
