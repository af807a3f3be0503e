"""Which of the installed plugins a configuration may use: blocked ones, and those of a package among several."""

from pathlib import Path

import pytest

from agentrl_core.api import ConfigError
from agentrl_core.config import Config, load_config
from agentrl_testing.plugins import IsolatedPlugins, isolated_plugins
from tests.config.conftest import VALID

__all__ = ["isolated_plugins"]

OURS = (
    "agentrl-core",
    "agentrl-algorithms",
    "agentrl-dataset-prompts",
    "agentrl-engine-hf",
    "agentrl-loop-single-turn",
    "agentrl-tool-parsers",
    "agentrl-rewards-basic",
    "agentrl-trackers-basic",
)


@pytest.fixture
def twins(isolated_plugins: IsolatedPlugins) -> IsolatedPlugins:
    """Two packages with one reward function of one name; their implementations do not exist."""
    isolated_plugins.allow(*OURS)
    for dist in ("acme-one", "acme-two"):
        module = dist.replace("-", "_")
        text = (
            "from agentrl_core.api import PluginSpec\n"
            f"PLUGIN = PluginSpec('reward_function', 'exact', 1, 'exact', '{module}.nowhere:exact')\n"
        )
        isolated_plugins.add(
            dist, {"agentrl.reward_functions": {"exact": f"{module}:PLUGIN"}}, modules={f"{module}.py": text}
        )
    return isolated_plugins


def load(folder: Path, *overrides: str) -> Config:
    path = folder / "config.yaml"
    path.write_text(VALID, encoding="utf-8")
    return load_config(path, overrides, check_files=False)


def problem(folder: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, *overrides)
    (found,) = caught.value.problems
    return found


def test_two_packages_with_one_name(twins: IsolatedPlugins, tmp_path: Path) -> None:
    assert problem(tmp_path) == (
        "reward.functions.0.name (config.yaml:9): reward function 'exact' is registered by acme-one 0.1.0 and acme-two "
        "0.1.0: write 'acme-one:exact' or 'acme-two:exact', or uninstall one"
    )


def test_package_and_name_picks_one(twins: IsolatedPlugins, tmp_path: Path) -> None:
    (slot,) = load(tmp_path, "reward.functions=['acme-two:exact']").reward.functions
    assert slot.ref is not None
    assert (slot.registered_name, slot.ref.name, slot.ref.dist) == ("exact", "exact", "acme-two")


@pytest.mark.parametrize("blocked", ["acme-one", "acme-one:exact"])
def test_a_blocked_package_leaves_the_other(twins: IsolatedPlugins, tmp_path: Path, blocked: str) -> None:
    (slot,) = load(tmp_path, f"plugins.block=['{blocked}']").reward.functions
    assert slot.ref is not None and slot.ref.dist == "acme-two"


def test_the_configuration_and_the_environment_block_together(
    twins: IsolatedPlugins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_PLUGINS_BLOCK", "acme-one, hermes")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "plugins.block=[acme-two]")
    assert caught.value.problems == (
        "rollout.tool_parser.name (default): tool-call parser 'hermes' of package agentrl-tool-parsers 0.1.0 is "
        "blocked: take it out of plugins.block or AGENTRL_PLUGINS_BLOCK",
        "reward.functions.0.name (config.yaml:9): reward function 'exact' of package acme-one 0.1.0 is blocked: take "
        "it out of plugins.block or AGENTRL_PLUGINS_BLOCK",
    )
