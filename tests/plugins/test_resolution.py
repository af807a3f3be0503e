import dataclasses
import sys

import pytest

from agentrl_core.api import (
    PluginBrokenError,
    PluginConflictError,
    PluginDriftError,
    PluginIncompatibleError,
    PluginNotFoundError,
    PluginRef,
    PluginRequirementError,
    TemplateError,
)
from agentrl_core.plugins.official import OFFICIAL
from agentrl_core.plugins.resolution import resolve, resolve_ref
from agentrl_testing.plugins import IsolatedPlugins

SPEC = """
from dataclasses import dataclass
from agentrl_core.api import PluginSpec

@dataclass
class Options:
    volume: int = 3

PLUGIN = PluginSpec(kind="tool", name="shout", api_version=1, summary="shouts",
                    factory="{package}.shout:Shout", config=Options{more})
"""
FACTORY = """
class Shout:
    def __init__(self, config, context):
        self.config, self.context = config, context
"""


def add_shout(
    plugins: IsolatedPlugins,
    dist: str = "acme-tools",
    *,
    version: str = "0.1.0",
    more: str = "",
    factory: str = FACTORY,
) -> None:
    package = dist.replace("-", "_")
    plugins.add(
        dist,
        {"agentrl.tools": {"shout": f"{package}.plugin:PLUGIN"}},
        version=version,
        modules={f"{package}/plugin.py": SPEC.format(package=package, more=more), f"{package}/shout.py": factory},
    )


def message_of(error: type[Exception], kind: str, name: str) -> str:
    with pytest.raises(error) as caught:
        resolve(kind, name)
    return str(caught.value)


def test_resolve_load_build(isolated_plugins: IsolatedPlugins) -> None:
    add_shout(isolated_plugins)
    plugin = resolve("tool", "shout")
    assert plugin.ref == PluginRef("tool", "shout", "acme-tools", "0.1.0")
    assert "acme_tools.shout" not in sys.modules
    built = plugin.build(plugin.spec.config(volume=11), "context")
    assert type(built) is plugin.load()
    assert (built.config.volume, built.context) == (11, "context")


def test_plugin_installed_while_the_process_runs_resolves_at_once(isolated_plugins: IsolatedPlugins) -> None:
    message_of(PluginNotFoundError, "tool", "shout")
    add_shout(isolated_plugins)
    assert resolve("tool", "shout").ref.dist == "acme-tools"


def test_package_selects_among_two_of_one_name(isolated_plugins: IsolatedPlugins) -> None:
    add_shout(isolated_plugins, "acme-one")
    add_shout(isolated_plugins, "acme-two", version="2.0")
    assert message_of(PluginConflictError, "tool", "shout") == (
        "tool 'shout' is registered by acme-one 0.1.0 and acme-two 2.0: write 'acme-one:shout' or 'acme-two:shout', or "
        "uninstall one"
    )
    assert "acme_one.plugin" not in sys.modules, "a conflict is found without importing either"
    plugin = resolve("tool", "acme_two:shout")
    assert plugin.ref == PluginRef("tool", "shout", "acme-two", "2.0")
    assert plugin.load().__module__ == "acme_two.shout"
    assert resolve_ref(plugin.ref) == plugin


def test_blocked(isolated_plugins: IsolatedPlugins, monkeypatch: pytest.MonkeyPatch) -> None:
    add_shout(isolated_plugins, "acme-one")
    add_shout(isolated_plugins, "acme-two")
    assert resolve("tool", "shout", block=["acme-one"]).ref.dist == "acme-two"
    monkeypatch.setenv("AGENTRL_PLUGINS_BLOCK", "shout")
    assert message_of(PluginNotFoundError, "tool", "shout") == (
        "tool 'shout' of package acme-one 0.1.0 is blocked: take it out of plugins.block or AGENTRL_PLUGINS_BLOCK"
    )


def test_misspelt_name_suggests_the_nearest(isolated_plugins: IsolatedPlugins) -> None:
    add_shout(isolated_plugins)
    assert message_of(PluginNotFoundError, "tool", "shuot") == (
        "no tool 'shuot' is installed; did you mean 'shout'?; installed: shout"
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "tool_agnet",
            "no agent loop 'tool_agnet' is installed; did you mean 'tool_agent'?; 'tool_agent' comes with: pip install "
            "agentrl-loop-tool-agent (all plugins: pip install agentrl-all); no agent loop is installed at all",
        ),
        (
            "single_turn",
            "no agent loop 'single_turn' is installed; 'single_turn' comes with: pip install agentrl-loop-single-turn "
            "(all plugins: pip install agentrl-all); no agent loop is installed at all",
        ),
    ],
)
def test_official_plugin_that_is_not_installed_says_how_to_install_it(
    isolated_plugins: IsolatedPlugins, name: str, message: str
) -> None:
    assert message_of(PluginNotFoundError, "agent_loop", name) == message


def test_name_of_another_kind(isolated_plugins: IsolatedPlugins) -> None:
    add_shout(isolated_plugins)
    assert "'shout' is a tool;" in message_of(PluginNotFoundError, "tracker", "shout")


def test_name_from_the_wrong_package(isolated_plugins: IsolatedPlugins) -> None:
    add_shout(isolated_plugins)
    assert message_of(PluginNotFoundError, "tool", "other:shout") == (
        "no tool 'shout' is installed from package 'other'; it comes from acme-tools; installed: shout"
    )


def test_unknown_kind(isolated_plugins: IsolatedPlugins) -> None:
    assert message_of(PluginNotFoundError, "tols", "shout").startswith("there is no plugin kind 'tols'; allowed are")


def test_wrong_api_version(isolated_plugins: IsolatedPlugins) -> None:
    source = "from agentrl_core.api import PluginSpec\nPLUGIN = PluginSpec('tool', 'old', 0, 's', 'a:b')\n"
    isolated_plugins.add("acme", {"agentrl.tools": {"old": "acme:PLUGIN"}}, modules={"acme.py": source})
    assert message_of(PluginIncompatibleError, "tool", "old").endswith("pip install --upgrade acme")


def test_spec_that_raises_keeps_its_cause(isolated_plugins: IsolatedPlugins) -> None:
    isolated_plugins.add("acme", {"agentrl.tools": {"x": "acme:PLUGIN"}}, modules={"acme.py": "1 / 0\n"})
    with pytest.raises(PluginBrokenError, match="^package acme 0.1.0 is broken: .*ZeroDivisionError") as caught:
        resolve("tool", "x")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_unknown_capability(isolated_plugins: IsolatedPlugins) -> None:
    add_shout(isolated_plugins, more=", capabilities=frozenset({'loudly'})")
    assert message_of(PluginBrokenError, "tool", "shout").endswith("unknown capability 'loudly': a tool has none")


@pytest.mark.parametrize(
    ("factory", "reason", "cause"),
    [
        ("raise OSError('disk')\n", "OSError: disk", OSError),
        ("", "AttributeError: module 'acme_tools.shout' has no attribute 'Shout'", AttributeError),
        ("import sys; sys.exit(1)\n", "SystemExit: 1", SystemExit),
    ],
)
def test_factory_that_does_not_import(
    isolated_plugins: IsolatedPlugins, factory: str, reason: str, cause: type[BaseException]
) -> None:
    add_shout(isolated_plugins, factory=factory)
    plugin = resolve("tool", "shout")
    with pytest.raises(PluginBrokenError) as caught:
        plugin.load()
    assert str(caught.value).startswith(
        "package acme-tools 0.1.0 is broken: importing the factory acme_tools.shout:Shout of tool 'shout' raised "
        + reason
    )
    assert isinstance(caught.value.__cause__, cause)


def test_factory_that_raises(isolated_plugins: IsolatedPlugins) -> None:
    add_shout(isolated_plugins, factory="def Shout(config, context):\n    raise KeyError('voice')\n")
    with pytest.raises(PluginBrokenError) as caught:
        resolve("tool", "shout").build(None, None)
    assert str(caught.value) == (
        "package acme-tools 0.1.0: building tool 'shout' raised KeyError: 'voice' "
        f"({isolated_plugins.path / 'acme_tools' / 'shout.py'}:2)"
    )
    assert isinstance(caught.value.__cause__, KeyError)


def test_error_of_our_own_tree_passes_unchanged(isolated_plugins: IsolatedPlugins) -> None:
    factory = "from agentrl_core.api import TemplateError\ndef Shout(c, x):\n    raise TemplateError('no tools')\n"
    add_shout(isolated_plugins, factory=factory)
    with pytest.raises(TemplateError, match="^no tools$"):
        resolve("tool", "shout").build(None, None)


def test_missing_requirement_is_named_before_the_factory_is_imported(isolated_plugins: IsolatedPlugins) -> None:
    add_shout(isolated_plugins, more=", requires=('agentrl-no-such>=2',)", factory="raise OSError")
    plugin = resolve("tool", "shout")
    with pytest.raises(PluginRequirementError) as caught:
        plugin.load()
    assert str(caught.value) == (
        "tool 'shout' of package acme-tools 0.1.0 needs agentrl-no-such>=2 (found nothing) in "
        f"{sys.executable}: pip install 'agentrl-no-such>=2'"
    )


def test_worker_resolves_the_reference(isolated_plugins: IsolatedPlugins) -> None:
    add_shout(isolated_plugins)
    plugin = resolve("tool", "shout")
    assert resolve_ref(plugin.ref) == plugin


@pytest.mark.parametrize("change", [{"version": "0.2.0"}, {"dist": "other-tools"}])
def test_worker_refuses_another_version_or_package(isolated_plugins: IsolatedPlugins, change: dict[str, str]) -> None:
    add_shout(isolated_plugins)
    ref = dataclasses.replace(resolve("tool", "shout").ref, **change)
    with pytest.raises(PluginDriftError) as caught:
        resolve_ref(ref)
    assert str(caught.value) == (
        f"tool 'shout' is {ref.dist} {ref.version} in the driver, but acme-tools 0.1.0 for {sys.executable}; in this "
        f"environment: pip install '{ref.dist}=={ref.version}'"
    )


def test_worker_without_the_plugin(isolated_plugins: IsolatedPlugins) -> None:
    with pytest.raises(PluginNotFoundError, match="which the driver uses, is not installed for .*'acme==1.0'"):
        resolve_ref(PluginRef("tool", "shout", "acme", "1.0"))


def test_official_table_agrees_with_what_is_installed() -> None:
    """Not isolated: whichever of our plugins are installed here are the ones that the table says."""
    from agentrl_core.api.plugin import CLI_GROUP
    from agentrl_core.plugins.discovery import discover
    from agentrl_core.plugins.registration import registered_in

    found = [((row.kind, row.name), row.dist) for row in discover()]
    found += [(("command", command.name), command.dist) for command in registered_in(CLI_GROUP)]
    installed = {key: dist for key, dist in found if dist in OFFICIAL.values()}
    assert installed == {key: dist for key, dist in OFFICIAL.items() if key in installed}
