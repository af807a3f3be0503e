import json
import textwrap
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner, Result

from agentrl_core.cli.main import app
from agentrl_core.plugins.discovery import discover
from agentrl_testing.plugins import IsolatedPlugins

SPEC = """
from dataclasses import dataclass, field
from typing import Literal
from agentrl_core.api import PluginSpec, option

@dataclass
class Voice:
    pitch: float = option(440.0, gt=0, unit="Hz", help="of the voice")

@dataclass
class Options:
    text: str = option(help="what is shouted")
    volume: int = option(3, ge=1, le=11, help="how loud")
    style: Literal["plain", "bold"] = option("plain")
    voice: Voice = field(default_factory=Voice)
    names: list[str] = option(default_factory=list)

PLUGIN = PluginSpec(kind="{kind}", name="{name}", api_version=1, summary="shouts", factory="acme.shout:Shout",
                    config=Options, requires=("pluggy>=1", "agentrl-no-such"))
"""


def add_plugin(plugins: IsolatedPlugins, dist: str = "acme-tools", kind: str = "tool", name: str = "shout") -> None:
    package = dist.replace("-", "_")
    plugins.add(
        dist,
        {f"agentrl.{kind}s": {name: f"{package}:PLUGIN"}},
        modules={f"{package}.py": SPEC.replace("{kind}", kind).replace("{name}", name)},
    )


def agentrl(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def shown(*arguments: str) -> Any:
    result = agentrl("plugins", *arguments, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout)


def test_list_as_json(isolated_plugins: IsolatedPlugins) -> None:
    add_plugin(isolated_plugins)
    assert shown("list") == {
        "schema_version": 1,
        "plugins": [
            {
                "kind": "tool",
                "name": "shout",
                "package": "acme-tools",
                "version": "0.1.0",
                "api_version": 1,
                "status": "missing-extra",
                "summary": "shouts",
                "error": "needs agentrl-no-such (found nothing): pip install 'agentrl-no-such'",
                "requires": ["pluggy>=1", "agentrl-no-such"],
                "capabilities": [],
                "factory": "acme.shout:Shout",
                "location": str(isolated_plugins.path / "acme_tools.py"),
            }
        ],
    }
    assert shown("list", "--kind", "engine")["plugins"] == []


def test_list_is_whole_on_a_narrow_terminal(isolated_plugins: IsolatedPlugins, monkeypatch: pytest.MonkeyPatch) -> None:
    add_plugin(isolated_plugins, dist="acme-tools-with-a-long-name", name="shout_loudly")
    monkeypatch.setattr("agentrl_core.cli.plugins.console_of_stdout", lambda: Console(width=80, highlight=False))
    lines = agentrl("plugins", "list", "--verbose").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    for whole in ("shout_loudly", "shouts", "acme-tools-with-a-long-name 0.1.0, missing-extra"):
        assert whole in text


def test_list_as_a_table_has_one_line_per_plugin(isolated_plugins: IsolatedPlugins) -> None:
    add_plugin(isolated_plugins)
    isolated_plugins.add("acme-broken", {"agentrl.engines": {"fast": "acme_nowhere:PLUGIN"}})
    result = agentrl("plugins", "list")
    assert result.exit_code == 0
    header, engine, tool = result.stdout.splitlines()
    assert header.split() == ["KIND", "NAME", "PACKAGE", "VERSION", "API", "STATUS", "SUMMARY"]
    assert engine.split()[:5] == ["engine", "fast", "acme-broken", "0.1.0", "broken"]
    assert "No module named 'acme_nowhere'" in engine
    assert tool.split()[:6] == ["tool", "shout", "acme-tools", "0.1.0", "1", "missing-extra"]


def test_verbose_list_adds_what_the_spec_says(isolated_plugins: IsolatedPlugins) -> None:
    add_plugin(isolated_plugins)
    output = agentrl("plugins", "list", "--verbose").stdout
    assert "factory: acme.shout:Shout" in output
    assert "requires: pluggy>=1, agentrl-no-such" in output


def test_json_stays_clean_although_a_plugin_prints(isolated_plugins: IsolatedPlugins) -> None:
    isolated_plugins.add(
        "acme-loud", {"agentrl.tools": {"loud": "acme_loud:PLUGIN"}}, modules={"acme_loud.py": "print('HELLO')\n"}
    )
    result = agentrl("plugins", "list", "--json")
    assert json.loads(result.stdout)["plugins"][0]["status"] == "broken"


def test_list_of_nothing_is_no_error(isolated_plugins: IsolatedPlugins) -> None:
    result = agentrl("plugins", "list")
    assert result.exit_code == 0


def test_unknown_kind_lists_the_kinds(isolated_plugins: IsolatedPlugins) -> None:
    result = agentrl("plugins", "list", "--kind", "tols")
    assert result.exit_code == 2
    assert "tool_parser" in result.stderr


def test_show(isolated_plugins: IsolatedPlugins) -> None:
    add_plugin(isolated_plugins)
    result = agentrl("plugins", "show", "shout")
    assert result.exit_code == 0
    for part in (
        "acme-tools 0.1.0",
        "acme.shout:Shout",
        "agentrl-no-such (found nothing): not met here",
        "how loud",
        "voice.pitch",
        "Hz",
        "required",
    ):
        assert part in result.stdout
    fragment = textwrap.dedent(result.stdout.partition("in a configuration")[2])
    assert yaml.safe_load(fragment) == {
        "tools": [
            {
                "name": "shout",
                "config": {"text": "???", "volume": 3, "style": "plain", "voice": {"pitch": 440.0}, "names": []},
            }
        ]
    }


def test_show_as_json_has_the_options(isolated_plugins: IsolatedPlugins) -> None:
    add_plugin(isolated_plugins)
    content = shown("show", "acme-tools:shout")
    assert content["plugin"]["name"] == "shout"
    assert [state["met"] for state in content["requirements"]] == [True, False]
    options = {option["path"]: option for option in content["options"]}
    assert list(options) == ["text", "volume", "style", "voice.pitch", "names"]
    assert options["text"]["default"] == "required" and "bold" in options["style"]["type"]
    assert options["volume"] == {
        "path": "volume", "type": "int", "default": "3", "help": "how loud", "unit": "", "bounds": ">= 1 and <= 11",
    }  # fmt: skip
    assert options["voice.pitch"]["unit"] == "Hz"
    assert yaml.safe_load(content["yaml"])["tools"][0]["config"]["volume"] == 3


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("engine", "rollout.engine"),
        ("reward_manager", "reward.manager"),
        ("policy_losse", "algorithm.loss"),
        ("rollout_correction", "algorithm.correction"),
    ],
)
def test_fragment_stands_where_the_configuration_has_the_slot(
    isolated_plugins: IsolatedPlugins, kind: str, path: str
) -> None:
    source = SPEC.replace("{kind}", kind.replace("losse", "loss")).replace("{name}", "shout")
    isolated_plugins.add("acme", {f"agentrl.{kind}s": {"shout": "acme:PLUGIN"}}, modules={"acme.py": source})
    fragment = yaml.safe_load(shown("show", "shout")["yaml"])
    for key in path.split("."):
        fragment = fragment[key]
    assert fragment["name"] == "shout"


def test_show_of_a_broken_plugin_says_why(isolated_plugins: IsolatedPlugins) -> None:
    isolated_plugins.add("acme", {"agentrl.tools": {"shout": "acme_nowhere:PLUGIN"}})
    result = agentrl("plugins", "show", "shout")
    assert result.exit_code == 0
    assert "No module named 'acme_nowhere'" in result.stdout
    assert "config" not in shown("show", "shout")


def test_show_of_a_misspelt_name(isolated_plugins: IsolatedPlugins) -> None:
    add_plugin(isolated_plugins)
    result = agentrl("plugins", "show", "shuot")
    assert result.exit_code == 2
    assert result.stderr == (
        "error: no installed plugin is named 'shuot'; did you mean 'shout'? See: agentrl plugins list\n"
    )


def test_show_of_an_ambiguous_name(isolated_plugins: IsolatedPlugins) -> None:
    add_plugin(isolated_plugins)
    add_plugin(isolated_plugins, "acme-trackers", "tracker")
    result = agentrl("plugins", "show", "shout")
    assert (result.exit_code, result.stderr) == (
        2,
        "error: 'shout' names plugins of several kinds: add --kind tool or --kind tracker\n",
    )
    assert shown("show", "shout", "--kind", "tracker")["plugin"]["package"] == "acme-trackers"


def test_show_of_a_duplicate(isolated_plugins: IsolatedPlugins) -> None:
    add_plugin(isolated_plugins, "acme-one")
    add_plugin(isolated_plugins, "acme-two")
    result = agentrl("plugins", "show", "shout")
    assert (result.exit_code, result.stderr) == (
        2,
        "error: 'shout' is registered by several packages: write acme-one:shout or acme-two:shout\n",
    )
    assert "name: acme-two:shout" in shown("show", "acme-two:shout")["yaml"]


def test_show_as_json_stays_clean_although_the_plugin_writes_to_stdout(
    isolated_plugins: IsolatedPlugins, capfd: pytest.CaptureFixture[str]
) -> None:
    add_plugin(isolated_plugins)
    file = isolated_plugins.path / "acme_tools.py"
    file.write_text("import os\nos.write(1, b'HELLO')\n" + file.read_text())
    assert shown("show", "shout")["plugin"]["name"] == "shout"
    assert capfd.readouterr().out == ""


def test_show_loads_only_what_has_the_name(isolated_plugins: IsolatedPlugins) -> None:
    add_plugin(isolated_plugins)
    hangs = "import threading\nthreading.Event().wait()\n"
    isolated_plugins.add("acme-slow", {"agentrl.tools": {"slow": "acme_slow:PLUGIN"}}, modules={"acme_slow.py": hangs})
    assert shown("show", "shout")["plugin"]["name"] == "shout"


INSTALLED = sorted({(row.kind, row.name) for row in discover()})


@pytest.mark.parametrize(("kind", "name"), INSTALLED, ids=lambda value: str(value))
def test_every_installed_plugin_is_shown_with_a_fragment_that_a_configuration_takes(kind: str, name: str) -> None:
    result = agentrl("plugins", "show", name, "--kind", kind)
    assert result.exit_code == 0 and result.exception is None, result.output
    content = json.loads(agentrl("plugins", "show", name, "--kind", kind, "--json").stdout)
    if "yaml" in content:
        slot: Any = yaml.safe_load(content["yaml"])
        while isinstance(slot, list) or "name" not in slot:
            slot = slot[0] if isinstance(slot, list) else next(iter(slot.values()))
        known = {option["path"].partition(".")[0].removesuffix("[]") for option in content["options"]}
        assert set(slot.get("config", {})) <= known and "NAME" not in content["yaml"]
