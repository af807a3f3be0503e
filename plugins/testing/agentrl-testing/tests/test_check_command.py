import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from agentrl_core.cli.main import app
from agentrl_testing.plugins import IsolatedPlugins

SPEC = """
from agentrl_core.api import PluginSpec

PLUGIN = PluginSpec(kind="tool", name="{name}", api_version=1, summary="shouts", factory="{package}_factory:Shout")
"""
FACTORY = """
from agentrl_core.api import Tool, function_schema

class Shout(Tool):
    schema = function_schema("shout", "Shouts.", {})

    async def execute(self, instance_id, parameters, **kwargs): ...
"""
IN_A_WORKER = "import os, sys\nin_a_worker = any('default_worker' in argument for argument in sys.argv)\n"


@pytest.fixture(autouse=True)
def path_of_children(isolated_plugins: IsolatedPlugins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(isolated_plugins.path))


@pytest.fixture(autouse=True)
def command(isolated_plugins: IsolatedPlugins) -> None:
    """The command is there, but nothing else of agentrl-testing."""
    isolated_plugins.add("test-commands", {"agentrl.cli": {"plugins.check": "agentrl_testing.cli:check"}})


def add_plugin(plugins: IsolatedPlugins, dist: str = "acme-tools", name: str = "shout", before: str = "") -> None:
    package = dist.replace("-", "_")
    plugins.add(
        dist,
        {"agentrl.tools": {name: f"{package}:PLUGIN"}},
        modules={
            f"{package}.py": SPEC.format(name=name, package=package),
            f"{package}_factory.py": before + FACTORY,
        },
    )


def check(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["plugins", "check", "--no-ray", *arguments])


def test_json_has_every_result(isolated_plugins: IsolatedPlugins) -> None:
    add_plugin(isolated_plugins)
    add_plugin(isolated_plugins, "acme-bad", "whisper", before="raise RuntimeError('no')\n")
    result = check("--json")
    good, bad = sorted(json.loads(result.stdout)["plugins"], key=lambda each: each["name"])
    assert (result.exit_code, good["status"], good["problems"]) == (1, "ok", [])
    assert (bad["name"], bad["status"]) == ("whisper", "failed") and "RuntimeError" in bad["traceback"]


def test_all_that_is_installed(isolated_plugins: IsolatedPlugins) -> None:
    add_plugin(isolated_plugins)
    add_plugin(isolated_plugins, "acme-good", "whisper")
    result = check()
    assert (result.exit_code, result.stdout.splitlines()) == (
        0,
        [
            "ok        tool 'shout' of package acme-tools 0.1.0",
            "ok        tool 'whisper' of package acme-good 0.1.0",
            "2 checked, 0 failed",
        ],
    )


def test_failure_names_the_package_above_the_whole_traceback(isolated_plugins: IsolatedPlugins) -> None:
    add_plugin(isolated_plugins, before="raise OSError('no microphone')\n")
    add_plugin(isolated_plugins, "acme-good", "whisper")
    result = check()
    place = isolated_plugins.path / "acme_tools_factory.py"
    head, problem, traceback, *_, cause, good, count = result.stdout.splitlines()
    assert result.exit_code == 1
    assert head == "failed    tool 'shout' of package acme-tools 0.1.0"
    assert problem.strip() == (
        "package acme-tools 0.1.0 is broken: importing the factory acme_tools_factory:Shout of tool 'shout' raised "
        f"OSError: no microphone ({place}:1)"
    )
    assert traceback == "Traceback (most recent call last):"
    assert cause == "OSError: no microphone"
    assert good == "ok        tool 'whisper' of package acme-good 0.1.0"
    assert count == "2 checked, 1 failed"


def test_only_those_that_are_named(isolated_plugins: IsolatedPlugins) -> None:
    add_plugin(isolated_plugins, before="raise OSError\n")
    add_plugin(isolated_plugins, "acme-good", "whisper")
    assert check("whisper").stdout.splitlines()[-1] == "1 checked, 0 failed"
    assert check("--kind", "engine").stdout == "0 checked, 0 failed\n"


def test_two_packages_with_one_name(isolated_plugins: IsolatedPlugins) -> None:
    add_plugin(isolated_plugins, "acme-one")
    add_plugin(isolated_plugins, "acme-two")
    result = check("shout")
    assert result.exit_code == 1
    conflict = (
        "tool 'shout' is registered by acme-one 0.1.0 and acme-two 0.1.0: write 'acme-one:shout' or "
        "'acme-two:shout', or uninstall one\n"
    )
    assert result.stdout.count(conflict) == 2
    assert check("acme-two:shout").stdout.splitlines() == [
        "ok        tool 'shout' of package acme-two 0.1.0",
        "1 checked, 0 failed",
    ]


def test_blocked_plugin_is_not_checked(isolated_plugins: IsolatedPlugins, monkeypatch: pytest.MonkeyPatch) -> None:
    add_plugin(isolated_plugins, before="raise OSError\n")
    monkeypatch.setenv("AGENTRL_PLUGINS_BLOCK", "shout")
    result = check()
    assert (result.exit_code, result.stdout.splitlines()) == (
        0,
        ["blocked   tool 'shout' of package acme-tools 0.1.0: by AGENTRL_PLUGINS_BLOCK", "0 checked, 0 failed"],
    )


def test_unknown_group(isolated_plugins: IsolatedPlugins) -> None:
    isolated_plugins.add("acme-tools", {"agentrl.tool": {"shout": "acme_tools:PLUGIN"}})
    result = check()
    assert result.exit_code == 1
    assert (
        "package acme-tools 0.1.0: unknown entry-point group 'agentrl.tool': did you mean 'agentrl.tools'?"
        in result.stdout
    )


def test_misspelt_name(isolated_plugins: IsolatedPlugins) -> None:
    add_plugin(isolated_plugins)
    result = check("shuot")
    assert (result.exit_code, result.stderr) == (
        2,
        "error: no installed plugin is named 'shuot'; did you mean 'shout'? See: agentrl plugins list\n",
    )


@pytest.mark.slow
def test_in_a_ray_worker(isolated_plugins: IsolatedPlugins, tmp_path: Path) -> None:
    wait = "import threading\nif in_a_worker: threading.Event().wait()\n"
    add_plugin(isolated_plugins, "acme-good", "a-good")
    add_plugin(isolated_plugins, "acme-raises", "b-raises", IN_A_WORKER + "if in_a_worker: raise OSError('no sound')\n")
    add_plugin(isolated_plugins, "acme-hangs", "c-hangs", IN_A_WORKER + wait)
    add_plugin(isolated_plugins, "acme-dies", "d-dies", IN_A_WORKER + "if in_a_worker: os._exit(3)\n")
    add_plugin(isolated_plugins, "acme-last", "e-last")
    names = ["a-good", "b-raises", "c-hangs", "d-dies", "e-last"]
    code = "from agentrl_core.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "plugins", "check", "--timeout", "8", *names],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        # A process of its own sees the real one.
        env={**os.environ, "AGENTRL_PLUGINS_BLOCK": "test-commands"},
    )
    lines = done.stdout.splitlines()
    statuses = [line.split()[0] for line in lines if line.startswith(("ok ", "failed "))]
    assert statuses == ["ok", "failed", "failed", "failed", "ok"], done.stdout + done.stderr
    assert done.returncode == 1
    place = isolated_plugins.path / "acme_raises_factory.py"
    problems = [line.strip() for line in lines if "in a Ray worker" in line]
    assert problems[:2] == [
        "in a Ray worker: package acme-raises 0.1.0 is broken: importing the factory acme_raises_factory:Shout of tool "
        f"'b-raises' raised OSError: no sound ({place}:3)",
        "in a Ray worker: package acme-hangs 0.1.0 is broken: checking tool 'c-hangs' did not end within 8 s",
    ]
    assert problems[2].startswith("in a Ray worker: package acme-dies 0.1.0 is broken: checking tool 'd-dies' failed:")
    assert lines[-1] == "5 checked, 3 failed"


def test_the_name_of_a_package_checks_its_plugins(isolated_plugins: IsolatedPlugins) -> None:
    add_plugin(isolated_plugins)
    add_plugin(isolated_plugins, "acme-good", "whisper")
    assert check("acme_good").stdout.splitlines() == [
        "ok        tool 'whisper' of package acme-good 0.1.0",
        "1 checked, 0 failed",
    ]
