"""The table of what features require of plugins."""

import re
from pathlib import Path

import pytest

from agentrl_core.api import KINDS
from agentrl_core.config.capabilities import REQUIREMENTS, installed_with
from agentrl_core.config.introspect import element_type, is_slot, members
from agentrl_core.config.schema import Config
from agentrl_testing.plugins import IsolatedPlugins, isolated_plugins

__all__ = ["isolated_plugins"]

PLUGIN = """
from agentrl_core.api import PluginSpec
PLUGIN = PluginSpec(kind="engine", name="{name}", api_version=1, summary="s", factory="{module}.nowhere:Engine",
                    requires=({requires}), capabilities=frozenset({{"logprobs"}}))
"""


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda each: f"{each.slot}:{each.capability}")
def test_the_table_names_slots_and_declared_capabilities(requirement):
    found = Config
    for key in requirement.slot.split("."):
        found = members(found)[key].type
    slot = found if is_slot(found) else element_type(found)
    assert requirement.capability in KINDS[slot.kind].capabilities


def test_no_capability_of_a_slot_is_asked_for_twice():
    assert len({(each.slot, each.capability) for each in REQUIREMENTS}) == len(REQUIREMENTS)


def test_alternatives_are_usable_and_their_implementations_not_imported(isolated_plugins: IsolatedPlugins):
    for dist, name, requires in (
        ("acme-one", "fast", ""),
        ("acme-two", "elsewhere", '"nothing-like-it",'),
        ("acme-three", "slow", ""),
    ):
        module = dist.replace("-", "_")
        text = PLUGIN.format(name=name, module=module, requires=requires)
        isolated_plugins.add(dist, {"agentrl.engines": {name: f"{module}:PLUGIN"}}, modules={f"{module}.py": text})
    assert installed_with("engine", "logprobs", ()) == ["elsewhere", "fast", "slow"]
    assert installed_with("engine", "logprobs", ["acme-three"]) == ["elsewhere", "fast"]
    assert installed_with("engine", "abort", ()) == []


def test_nobody_asks_the_engine_for_weight_updates_elsewhere():
    core = Path(__file__).parents[2] / "agentrl_core"
    asking = [
        path.name
        for path in core.rglob("*.py")
        if re.search(r"""["']weight_update["'] (not )?in""", path.read_text(encoding="utf-8"))
    ]
    assert asking == []
