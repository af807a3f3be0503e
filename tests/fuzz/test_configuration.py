"""Any text as a configuration, and any value of any option: it loads, or the mistake is explained."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from agentrl_core.api import AgentRLError
from agentrl_core.config import load_config, to_yaml
from tests.conftest import tiny_config
from tests.fuzz.fuzzing import changed, corpus, fuzz, json_values, mutated, outcome

OPTIONS = [
    line.partition(":")[0]
    for line in (Path(__file__).parents[1] / "config" / "options.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
TINY = tiny_config(Path("model"), Path("."))
TEXTS = [*corpus("config"), yaml.safe_dump(TINY)]


@pytest.fixture(autouse=True)
def quick_discovery(installed_plugins: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl_core.plugins.resolution.registrations", installed_plugins)


def check(path: Path, text: str, *overrides: str) -> None:
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    config = outcome(lambda: load_config(path, overrides, check_files=False), AgentRLError)
    if not isinstance(config, AgentRLError):
        path.write_text(to_yaml(config), encoding="utf-8")
        assert to_yaml(load_config(path, check_files=False)) == to_yaml(config), "what is written is read back"


@fuzz
@given(mutated(TEXTS))
def test_any_text(tmp_path: Path, text: str) -> None:
    check(tmp_path / "config.yaml", text)


@fuzz
@given(changed(TINY))
def test_any_tree(tmp_path: Path, tree: Any) -> None:
    check(tmp_path / "config.yaml", json.dumps(tree))


@fuzz
@given(st.sampled_from(OPTIONS), json_values, st.booleans())
def test_any_value_of_any_option(tmp_path: Path, option: str, value: Any, as_json: bool) -> None:
    check(tmp_path / "config.yaml", yaml.safe_dump(TINY), f"{option}={json.dumps(value) if as_json else value}")


@fuzz
@given(mutated(["trainer.seed=3", "~tools", "tools.0.name=x", "+a.b={c: [1, 2]}", "rollout.engine=hf"]))
def test_any_override(tmp_path: Path, override: str) -> None:
    check(tmp_path / "config.yaml", yaml.safe_dump(TINY), override)
