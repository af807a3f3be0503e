"""Plugins that are wrong in every way that plugins are wrong, as `list` and `check` tell them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl_core.plugins.discovery import discover
from agentrl_core.testing.plugins import IsolatedPlugins

Agentrl = Callable[..., subprocess.CompletedProcess[str]]

SPEC = """
from agentrl_core.api import PluginSpec
PLUGIN = PluginSpec(kind="tool", name="thing", api_version=1, summary="does a thing", factory="acme_tool:Thing")
"""
TOOL = """
from agentrl_core.api import Tool, ToolResponse, ToolResult

class Thing(Tool):
    schema = {"type": "function", "function": {"name": "thing", "description": "does it", "parameters": {
        "type": "object", "properties": {}, "required": []}}}

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResult(ToolResponse("done"))
"""


@pytest.fixture
def agentrl(isolated_plugins: IsolatedPlugins) -> Agentrl:
    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from agentrl_core.cli.main import main; main()", *arguments]
        paths = {"PYTHONPATH": str(isolated_plugins.path), **environment}
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **paths})

    return run


@pytest.fixture
def acme(isolated_plugins: IsolatedPlugins) -> Callable[..., None]:
    def add(spec: str = SPEC, tool: str = TOOL, dist: str = "acme", target: str = "acme:PLUGIN") -> None:
        module = target.partition(":")[0]
        files = {f"{module}.py": spec, "acme_tool.py": tool} if spec else {}
        isolated_plugins.add(dist, {"agentrl.tools": {"thing": target}}, modules=files)

    return add


def failure(agentrl: Agentrl, *arguments: str) -> str:
    done = agentrl("plugins", "check", "thing", "--no-ray", *arguments)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.endswith("1 checked, 1 failed\n")
    return done.stdout.partition("failed: ")[2]


def listed(agentrl: Agentrl) -> dict[str, object]:
    done = agentrl("plugins", "list", "--kind", "tool", "--json")
    assert done.returncode == 0, done.stderr
    (row,) = [row for row in json.loads(done.stdout)["plugins"] if row["name"] == "thing"]
    return dict(row)


def test_a_good_plugin_passes(acme: Callable[..., None], agentrl: Agentrl) -> None:
    acme()
    done = agentrl("plugins", "check", "acme", "--no-ray")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 checked, 0 failed" in done.stdout
    assert listed(agentrl)["status"] == "ok"


@pytest.mark.ray
def test_a_good_plugin_passes_in_a_ray_worker_too(acme: Callable[..., None], agentrl: Agentrl) -> None:
    acme()
    done = agentrl("plugins", "check", "acme:thing", "agentrl-tools-basic")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("tool ")]
    assert [row[-2:] for row in rows] == [["ok", "ok"], ["ok", "ok"]]


@pytest.mark.ray
def test_a_plugin_that_fails_only_in_a_ray_worker(acme: Callable[..., None], agentrl: Agentrl) -> None:
    acme(tool="import sys\nif 'ray' in sys.modules:\n    raise OSError('no worker')\n" + TOOL)
    done = agentrl("plugins", "check", "thing")
    assert done.returncode == 1, done.stdout + done.stderr
    assert (
        "package acme 0.1.0 is broken: importing the factory acme_tool:Thing of tool 'thing' raised OSError: no "
        in (done.stdout)
    )


def test_one_that_raises_at_import(
    acme: Callable[..., None], agentrl: Agentrl, isolated_plugins: IsolatedPlugins
) -> None:
    acme("1 / 0")
    where = isolated_plugins.path / "acme.py"
    expected = (
        "package acme 0.1.0 is broken: importing acme:PLUGIN for tool 'thing' raised ZeroDivisionError: division by "
        f"zero ({where}:1)"
    )
    told = failure(agentrl)
    assert told.startswith(f"{expected}\nTraceback (most recent call last):\n")
    assert f'File "{where}", line 1, in <module>' in told
    assert (listed(agentrl)["status"], listed(agentrl)["error"]) == ("broken", expected)


def test_one_that_raises_in_its_factory(
    acme: Callable[..., None], agentrl: Agentrl, isolated_plugins: IsolatedPlugins
) -> None:
    acme(tool=TOOL + "\n    def __init__(self, config, context):\n        raise KeyError('key')\n")
    where = isolated_plugins.path / "acme_tool.py"
    told = failure(agentrl)
    assert told.startswith(f"package acme 0.1.0: building tool 'thing' raised KeyError: 'key' ({where}:12)\nTraceback")
    assert listed(agentrl)["status"] == "ok"


def test_one_whose_factory_does_not_import(acme: Callable[..., None], agentrl: Agentrl) -> None:
    acme(tool="import no_such_module")
    told = failure(agentrl)
    assert told.startswith(
        "package acme 0.1.0 is broken: importing the factory acme_tool:Thing of tool 'thing' raised "
        "ModuleNotFoundError: No module named 'no_such_module' ("
    )


def test_one_that_imports_torch_in_its_spec(acme: Callable[..., None], agentrl: Agentrl) -> None:
    acme("import torch\n" + SPEC)
    assert failure(agentrl).startswith(
        "package acme 0.1.0, tool 'thing': the module of its spec, acme, imports torch; import that where it is used, "
        "in the module of the factory: `agentrl plugins list` imports every spec\n"
    )


@pytest.mark.parametrize(
    ("old", "new", "message", "status"),
    [
        (
            'summary="does a thing"',
            'summary=""',
            "package acme 0.1.0 is broken: acme:PLUGIN for tool 'thing': summary is empty, must be one line for "
            "`agentrl plugins list`",
            "broken",
        ),
        (
            "api_version=1",
            "api_version=7",
            "tool 'thing' of package acme 0.1.0 was written for api_version 7 of tool; this agentrl-core has 1. "
            "Upgrade agentrl-core: pip install --upgrade agentrl-core",
            "incompatible",
        ),
        (
            "api_version=1",
            'api_version=1, capabilities=frozenset({"fly"})',
            "package acme 0.1.0 is broken: acme:PLUGIN for tool 'thing': unknown capability 'fly': a tool has none",
            "broken",
        ),
        (
            'kind="tool"',
            'kind="tracker"',
            "package acme 0.1.0 is broken: acme:PLUGIN for tool 'thing': kind is 'tracker', but the entry point is in "
            "group 'agentrl.tools'",
            "broken",
        ),
    ],
)
def test_a_spec_that_is_wrong(
    acme: Callable[..., None], agentrl: Agentrl, old: str, new: str, message: str, status: str
) -> None:
    acme(SPEC.replace(old, new))
    assert failure(agentrl).startswith(f"{message}\n")
    assert (listed(agentrl)["status"], listed(agentrl)["error"]) == (status, message)


def test_a_missing_extra(acme: Callable[..., None], agentrl: Agentrl) -> None:
    acme(SPEC.replace("api_version=1", 'api_version=1, requires=("agentrl-no-such>=2",)'))
    assert failure(agentrl).startswith(
        f"package acme 0.1.0, tool 'thing': needs agentrl-no-such>=2 (found nothing) in {sys.executable}: pip install "
        "'agentrl-no-such>=2'\n"
    )
    row = listed(agentrl)
    assert row["status"] == "missing-extra"
    assert row["error"] == "needs agentrl-no-such>=2 (found nothing): pip install 'agentrl-no-such>=2'"


def test_two_of_one_name(acme: Callable[..., None], agentrl: Agentrl) -> None:
    acme()
    acme(dist="zeta")
    done = agentrl("plugins", "check", "--kind", "tool", "--no-ray")
    assert done.returncode == 1
    assert (
        "failed: package acme 0.1.0, tool 'thing' is registered by acme 0.1.0 and zeta 0.1.0: write 'acme:thing' or "
        "'zeta:thing', or uninstall one\n" in done.stdout
    )
    assert agentrl("plugins", "check", "zeta:thing", "--no-ray").returncode == 0


def test_an_entry_point_to_nowhere(acme: Callable[..., None], agentrl: Agentrl) -> None:
    acme(spec="", target="acme_gone:PLUGIN")
    expected = (
        "package acme 0.1.0 is broken: importing acme_gone:PLUGIN for tool 'thing' raised ModuleNotFoundError: No "
        "module named 'acme_gone'"
    )
    assert failure(agentrl).startswith(f"{expected}\n")
    assert (listed(agentrl)["status"], listed(agentrl)["error"]) == ("broken", expected)


def test_one_that_prints(acme: Callable[..., None], agentrl: Agentrl) -> None:
    acme('import os\nprint("hello")\nos.write(1, b"from below")\n' + SPEC)
    assert listed(agentrl)["status"] == "ok"
    assert agentrl("plugins", "check", "thing", "--no-ray").returncode == 0
    done = agentrl("plugins", "show", "thing", "--json")
    assert json.loads(done.stdout)["plugin"]["name"] == "thing"
    assert "hello" in done.stderr
    assert "from below" in done.stderr


def test_one_that_hangs(
    acme: Callable[..., None], agentrl: Agentrl, monkeypatch: pytest.MonkeyPatch, isolated_plugins: IsolatedPlugins
) -> None:
    acme("import threading\nthreading.Event().wait()")
    assert failure(agentrl, "--timeout", "3").startswith(
        "package acme 0.1.0, tool 'thing': the check did not finish within 3 s\n"
    )
    (row,) = discover(["tool"], time_limit=0.2)
    assert row.status == "broken"
    assert row.error == (
        "package acme 0.1.0 is broken: importing acme:PLUGIN for tool 'thing' did not finish within 0.2 s"
    )


@pytest.mark.parametrize(
    ("tool", "problem"),
    [
        (
            TOOL.replace("async def execute", "def execute"),
            "package acme 0.1.0, tool 'thing': Thing.execute must be a coroutine function (async def)",
        ),
        (
            TOOL.replace("execute", "run"),
            "package acme 0.1.0, tool 'thing': Thing has no 'execute', which Tool must have",
        ),
        (
            "Thing = 3",
            "package acme 0.1.0, tool 'thing': the factory acme_tool:Thing is an object of type int, must be callable",
        ),
        (
            "def Thing(config): ...",
            "package acme 0.1.0, tool 'thing': the factory acme_tool:Thing cannot be called with (config, context): "
            "too many positional arguments",
        ),
        (
            TOOL.replace('"description": "does it"', '"description": ""'),
            "package acme 0.1.0, tool 'thing': its schema is no OpenAI function with name and description",
        ),
        (
            "import os\nos._exit(7)",
            "package acme 0.1.0, tool 'thing': the interpreter that checked it ended with code 7",
        ),
        (
            "raise SystemExit(0)",
            "package acme 0.1.0 is broken: importing the factory acme_tool:Thing of tool 'thing' raised SystemExit: 0",
        ),
    ],
)
def test_an_implementation_that_is_wrong(acme: Callable[..., None], agentrl: Agentrl, tool: str, problem: str) -> None:
    acme(tool=tool)
    assert failure(agentrl).startswith(problem)


def test_a_blocked_plugin_is_not_imported(acme: Callable[..., None], agentrl: Agentrl, tmp_path: Path) -> None:
    trace = tmp_path / "imported"
    acme(f"open({str(trace)!r}, 'w').close()\n" + SPEC)
    done = agentrl("plugins", "list", "--json", AGENTRL_PLUGINS_BLOCK="acme")
    assert [row["status"] for row in json.loads(done.stdout)["plugins"] if row["name"] == "thing"] == ["blocked"]
    assert agentrl("plugins", "check", "thing", AGENTRL_PLUGINS_BLOCK="acme").returncode == 2
    assert not trace.exists()
