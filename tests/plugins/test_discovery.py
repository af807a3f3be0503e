import importlib
import importlib.machinery
import os
import shutil
import sys

import pytest

from agentrl_core.plugins import registration
from agentrl_core.plugins.discovery import PluginRow, discover
from agentrl_core.plugins.registration import registrations
from agentrl_testing.plugins import IsolatedPlugins

TOOL = """
from agentrl_core.api import PluginSpec

PLUGIN = PluginSpec(kind="tool", name="{name}", api_version={api_version}, summary="shouts",
                    factory="{package}.shout:Shout"{more})
"""


def add_tool(
    plugins: IsolatedPlugins,
    dist: str = "acme-tools",
    name: str = "shout",
    *,
    api_version: int = 1,
    more: str = "",
    before: str = "",
    version: str = "0.1.0",
) -> str:
    """A distribution with one tool; returns the name of its package."""
    package = dist.replace("-", "_")
    source = before + TOOL.format(name=name, package=package, api_version=api_version, more=more)
    entry_points = {"agentrl.tools": {name: f"{package}.plugin:PLUGIN"}}
    plugins.add(dist, entry_points, version=version, modules={f"{package}/plugin.py": source})
    return package


def only_row(**arguments: list[str]) -> PluginRow:
    (row,) = discover(**arguments)
    return row


def test_good_plugin_is_listed_without_importing_its_implementation(isolated_plugins: IsolatedPlugins) -> None:
    package = add_tool(isolated_plugins, version="1.2.3")
    location = str(isolated_plugins.path / package / "plugin.py")
    assert only_row() == PluginRow(
        kind="tool",
        name="shout",
        dist="acme-tools",
        version="1.2.3",
        api_version=1,
        status="ok",
        summary="shouts",
        factory="acme_tools.shout:Shout",
        location=location,
    )
    assert "acme_tools.shout" not in sys.modules


@pytest.mark.parametrize("package", ["importlib.metadata", "importlib_metadata"])
def test_metadata_is_read_again_only_after_a_change(
    isolated_plugins: IsolatedPlugins, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    # Where the second one was imported, it finds the distributions also for the first one.
    finder = importlib.import_module(package).MetadataPathFinder
    others = [each for each in sys.meta_path if not hasattr(each, "find_distributions")]
    monkeypatch.setattr(sys, "meta_path", [*others, importlib.machinery.PathFinder, finder()])
    if package == "importlib_metadata":
        monkeypatch.delattr(importlib.machinery.PathFinder, "find_distributions", raising=False)
    reads = []
    read = registration._read
    monkeypatch.setattr(registration, "_read", lambda: reads.append(1) or read())
    monkeypatch.setattr(registration, "SETTLED_NS", 2_000_000_000)
    site = isolated_plugins.path

    def names() -> list[str]:
        return [each.name for each in registrations()]

    def age() -> None:
        for place in (site, *site.rglob("entry_points.txt")):
            os.utime(place, ns=(0, place.stat().st_mtime_ns - 10**10))

    add_tool(isolated_plugins)
    # Too fresh: a second change could have the same time.
    assert (names(), names(), len(reads)) == (["shout"], ["shout"], 2)
    age()
    assert (names(), names(), len(reads)) == (["shout"], ["shout"], 3)
    add_tool(isolated_plugins, "acme-whisper", "whisper")
    assert names() == ["shout", "whisper"]
    age()
    names()
    (site / "acme_tools-0.1.0.dist-info" / "entry_points.txt").write_text("[agentrl.tools]\ncry = acme:PLUGIN\n")
    assert names() == ["cry", "whisper"]
    age()
    names()
    shutil.rmtree(site / "acme_tools-0.1.0.dist-info")
    assert names() == ["whisper"]
    age()
    names()
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(site)])
    assert names() == []


def test_plugin_installed_while_the_process_runs_is_seen_at_once(isolated_plugins: IsolatedPlugins) -> None:
    assert discover() == []
    add_tool(isolated_plugins)
    assert only_row().name == "shout"


def test_kinds_select(isolated_plugins: IsolatedPlugins) -> None:
    add_tool(isolated_plugins)
    assert discover(["engine"]) == []
    assert len(discover(["engine", "tool"])) == 1


def test_order_is_by_kind_then_name_then_package(isolated_plugins: IsolatedPlugins) -> None:
    for dist, name in (("acme-b", "zoom"), ("acme-a", "zoom"), ("acme-c", "echo")):
        add_tool(isolated_plugins, dist, name)
    isolated_plugins.add("acme-z", {"agentrl.engines": {"quick": "acme_z:PLUGIN"}})
    assert [(row.kind, row.name, row.dist) for row in discover()] == [
        ("engine", "quick", "acme-z"),
        ("tool", "echo", "acme-c"),
        ("tool", "zoom", "acme-a"),
        ("tool", "zoom", "acme-b"),
    ]


def test_plugin_that_raises_at_import_is_a_row_and_the_others_stay(isolated_plugins: IsolatedPlugins) -> None:
    add_tool(isolated_plugins, "acme-good", "whisper")
    package = add_tool(isolated_plugins, before="raise RuntimeError('no licence')\n")
    broken, good = discover()
    assert good.status == "ok"
    assert broken.status == "broken"
    assert broken.error == (
        "package acme-tools 0.1.0 is broken: importing acme_tools.plugin:PLUGIN for tool 'shout' raised "
        f"RuntimeError: no licence ({isolated_plugins.path / package / 'plugin.py'}:1)"
    )


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ("raise SystemExit(3)\n", "SystemExit: 3"),
        ("x = = 1\n", "SyntaxError: invalid syntax"),
        ("raise AssertionError('never')\n", "AssertionError: never"),
        ("import agentrl_no_such_module\n", "ModuleNotFoundError: No module named 'agentrl_no_such_module'"),
    ],
)
def test_every_way_to_fail_at_import_is_a_row(isolated_plugins: IsolatedPlugins, before: str, reason: str) -> None:
    package = add_tool(isolated_plugins, before=before)
    assert only_row().status == "broken"
    assert f"raised {reason} ({isolated_plugins.path / package / 'plugin.py'}:1)" in only_row().error


def test_entry_point_to_a_missing_module_or_attribute(isolated_plugins: IsolatedPlugins) -> None:
    entries = {"agentrl.tools": {"a": "acme_gone.plugin:PLUGIN", "b": "acme_here:PLUGIN"}}
    isolated_plugins.add("acme", entries, modules={"acme_here.py": ""})
    errors = [row.error for row in discover()]
    assert errors == [
        "package acme 0.1.0 is broken: importing acme_gone.plugin:PLUGIN for tool 'a' raised "
        "ModuleNotFoundError: No module named 'acme_gone'",
        "package acme 0.1.0 is broken: importing acme_here:PLUGIN for tool 'b' raised "
        "AttributeError: module 'acme_here' has no attribute 'PLUGIN'",
    ]


def test_entry_point_that_names_the_class_itself(isolated_plugins: IsolatedPlugins) -> None:
    entries = {"agentrl.tools": {"shout": "acme:Shout"}}
    isolated_plugins.add("acme", entries, modules={"acme.py": "class Shout: pass\n"})
    assert only_row().error == (
        "package acme 0.1.0 is broken: acme:Shout for tool 'shout' is an object of type type, must be a PluginSpec"
    )


@pytest.mark.parametrize(
    ("api_version", "outdated"), [(0, "acme-tools"), (2, "agentrl-core")], ids=["old plugin", "old core"]
)
def test_wrong_api_version_says_which_package_to_upgrade(
    isolated_plugins: IsolatedPlugins, api_version: int, outdated: str
) -> None:
    add_tool(isolated_plugins, api_version=api_version, more=", capabilities={'unheard-of'}")
    row = only_row()
    assert (row.status, row.api_version) == ("incompatible", api_version)
    assert row.error == (
        f"tool 'shout' of package acme-tools 0.1.0 was written for api_version {api_version} of tool; this "
        f"agentrl-core has 1. Upgrade {outdated}: pip install --upgrade {outdated}"
    )


def test_two_packages_with_one_name_are_both_named(isolated_plugins: IsolatedPlugins) -> None:
    add_tool(isolated_plugins, "acme-one")
    add_tool(isolated_plugins, "acme-two", version="2.0")
    rows = discover()
    assert [row.status for row in rows] == ["duplicate", "duplicate"]
    assert {row.error for row in rows} == {
        "tool 'shout' is registered by acme-one 0.1.0 and acme-two 2.0: write 'acme-one:shout' or 'acme-two:shout', or "
        "uninstall one"
    }


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (", capabilities={'groups'}", "unknown capability 'groups': a tool has none"),
        (", config=dict", "config is <class 'dict'>, must be a dataclass"),
        (
            ", requires=('sglang>>1',)",
            "requires holds 'sglang>>1', which is not a PEP 508 requirement such as 'sglang>=0.5'",
        ),
        (", requires='sglang'", "requires is 'sglang', must be a tuple of PEP 508 strings"),
    ],
)
def test_spec_with_a_wrong_field_is_broken(isolated_plugins: IsolatedPlugins, more: str, problem: str) -> None:
    add_tool(isolated_plugins, more=more)
    assert only_row().status == "broken"
    assert only_row().error == (
        f"package acme-tools 0.1.0 is broken: acme_tools.plugin:PLUGIN for tool 'shout': {problem}"
    )


def test_all_problems_of_a_spec_are_named_together(isolated_plugins: IsolatedPlugins) -> None:
    source = """
from agentrl_core.api import PluginSpec
PLUGIN = PluginSpec("engine", "Loud", 1, " ", "acme.Shout", capabilities=frozenset({"log_probs"}))
"""
    isolated_plugins.add("acme", {"agentrl.engines": {"loud": "acme:PLUGIN"}}, modules={"acme.py": source})
    error = only_row().error
    assert "name is 'Loud', but the entry point is named 'loud'" in error
    assert "name 'Loud' may hold only lower-case letters" in error
    assert "summary is empty, must be one line" in error
    assert "factory is 'acme.Shout', must be 'package.module:attribute'" in error
    assert "unknown capability 'log_probs': did you mean 'logprobs'? allowed are logprobs, seeds, abort" in error


def test_spec_in_the_group_of_another_kind(isolated_plugins: IsolatedPlugins) -> None:
    source = "from agentrl_core.api import PluginSpec\nPLUGIN = PluginSpec('tool', 'x', 1, 's', 'a:b')\n"
    isolated_plugins.add("acme", {"agentrl.trackers": {"x": "acme:PLUGIN"}}, modules={"acme.py": source})
    assert "kind is 'tool', but the entry point is in group 'agentrl.trackers'" in only_row().error


def test_misspelt_group_is_not_silent(isolated_plugins: IsolatedPlugins) -> None:
    isolated_plugins.add("acme", {"agentrl.tool": {"x": "acme:PLUGIN"}})
    row = only_row()
    assert (row.kind, row.status) == ("agentrl.tool", "broken")
    assert row.error == ("package acme 0.1.0: unknown entry-point group 'agentrl.tool': did you mean 'agentrl.tools'?")


def test_missing_requirement(isolated_plugins: IsolatedPlugins) -> None:
    add_tool(isolated_plugins, more=", requires=('pluggy>=1', 'agentrl-no-such>=2', 'packaging>=9999')")
    row = only_row()
    assert row.status == "missing-extra"
    assert row.error.startswith("needs agentrl-no-such>=2 (found nothing), packaging>=9999 (found ")
    assert row.error.endswith(": pip install 'agentrl-no-such>=2' 'packaging>=9999'")


def test_requirement_of_another_platform_does_not_count(isolated_plugins: IsolatedPlugins) -> None:
    add_tool(isolated_plugins, more=""", requires=('agentrl-no-such; sys_platform == "plan9"',)""")
    assert only_row().status == "ok"


@pytest.mark.parametrize(("capabilities", "status"), [("abort", "external"), ("shared_module", "missing-extra")])
def test_engine_without_its_requirements_is_external_unless_it_lives_with_the_actor(
    isolated_plugins: IsolatedPlugins, capabilities: str, status: str
) -> None:
    source = f"""
from agentrl_core.api import PluginSpec
PLUGIN = PluginSpec("engine", "fast", 1, "s", "a:b", requires=("agentrl-no-such",),
                    capabilities=frozenset({{"{capabilities}"}}))
"""
    isolated_plugins.add("acme", {"agentrl.engines": {"fast": "acme:PLUGIN"}}, modules={"acme.py": source})
    assert only_row().status == status


@pytest.mark.parametrize("item", ["shout", "acme-tools", "Acme_Tools", "acme-tools:shout"])
def test_blocked_plugin_is_not_imported(
    isolated_plugins: IsolatedPlugins, item: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = add_tool(isolated_plugins)
    assert only_row(block=[item]).status == "blocked"
    monkeypatch.setenv("AGENTRL_PLUGINS_BLOCK", f"other, {item}")
    assert only_row().status == "blocked"
    assert f"{package}.plugin" not in sys.modules


def test_blocking_one_of_two_ends_the_conflict(isolated_plugins: IsolatedPlugins) -> None:
    add_tool(isolated_plugins, "acme-one")
    add_tool(isolated_plugins, "acme-two")
    assert [row.status for row in discover(block=["acme-one"])] == ["blocked", "ok"]


def test_what_a_plugin_prints_at_import_does_not_reach_stdout(
    isolated_plugins: IsolatedPlugins, capfd: pytest.CaptureFixture[str]
) -> None:
    add_tool(isolated_plugins, before="print('hello from acme')\n")
    assert only_row().status == "ok"
    captured = capfd.readouterr()
    assert captured.out == ""
    assert "hello from acme" in captured.err


def test_malformed_metadata_hides_only_its_own_distribution_and_is_reported(
    isolated_plugins: IsolatedPlugins, caplog: pytest.LogCaptureFixture
) -> None:
    add_tool(isolated_plugins)
    isolated_plugins.add_metadata("acme-damaged", "[agentrl.tools]\nno equals sign\n")
    assert [row.name for row in discover()] == ["shout"]
    assert "cannot read the entry points of" in caplog.text
    assert "acme_damaged-0.1.0.dist-info" in caplog.text


def test_distribution_without_metadata_file_is_listed(isolated_plugins: IsolatedPlugins) -> None:
    add_tool(isolated_plugins)
    (isolated_plugins.path / "acme_tools-0.1.0.dist-info" / "METADATA").unlink()
    row = only_row()
    assert (row.name, row.dist, row.version, row.status) == ("shout", "unknown", "", "ok")


def test_the_core_registers_its_own_through_the_same_groups(isolated_plugins: IsolatedPlugins) -> None:
    isolated_plugins.allow("agentrl-core")
    rows = discover()
    assert {row.dist for row in rows} == {"agentrl-core"}
    assert [row.error for row in rows if row.status not in ("ok", "missing-extra")] == []
    assert {"chat_template"} <= {row.name for row in rows}


def test_a_distribution_behind_another_of_its_name_is_not_seen(isolated_plugins: IsolatedPlugins) -> None:
    add_tool(isolated_plugins)
    earlier = isolated_plugins.path / "earlier"
    earlier.mkdir()
    info = earlier / "Acme.Tools-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Acme.Tools\nVersion: 2.0\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(earlier))
        assert discover() == [], "version 2.0, whose modules would be imported, has no plugins"
    assert [row.name for row in discover()] == ["shout"]
