"""The maze example: its environment keeps the contract, and a random walk learns to get further."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import EnvironmentContext, NoConfig, RewardTrajectory
from agentrl_core.config import load_config
from agentrl_core.plugins.resolution import resolve
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.trainer import Trainer
from agentrl_testing.contracts import EnvironmentCase, EnvironmentContract
from agentrl_testing.contracts.case import PluginContract, run

FOLDER = Path(__file__).parents[2] / "examples/maze"
MODULES = ("environment", "prepare")
CHECKS = sorted(name for name in set(dir(EnvironmentContract)) - set(dir(PluginContract)) if name.startswith("test_"))


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The example's modules by name, imported as its script imports them."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    yield {name: import_module(name) for name in MODULES}
    for name in MODULES:
        sys.modules.pop(name)
    sys.modules.update(before)


class Example(EnvironmentCase):
    def make(self) -> Any:
        plugin = resolve("environment", f"./environment.py:{self.spec.name}", base_dir=FOLDER)
        return plugin.build(NoConfig(), EnvironmentContext(self.spec.name))


@pytest.mark.parametrize("name", ["Maze", "OutcomeMaze"])
@pytest.mark.parametrize("check", CHECKS)
def test_the_environment_keeps_the_contract(check: str, name: str, modules: dict[str, Any]) -> None:
    spec = resolve("environment", f"./environment.py:{name}", base_dir=FOLDER).spec
    mazes = modules["environment"].MAZES
    getattr(EnvironmentContract(), check)(Example(spec, oracle=lambda task, seed, messages: mazes[task["maze"]]))


def walk(modules: dict[str, Any], name: str, doors: list[str]) -> tuple[list[float | None], float, str]:
    """The reward of each turn, the score, and what was said last."""
    episode = run(getattr(modules["environment"], name)(NoConfig(), EnvironmentContext(name)).open({"maze": 1}, 0))
    turns = [run(episode.reply([{"role": "assistant", "content": door}])) for door in doors]
    assert [turn.terminate for turn in turns] == [False] * (len(doors) - 1) + [True]
    return [turn.reward for turn in turns], run(episode.score(RewardTrajectory([], "", "", ""))).score, turns[-2].text


def test_each_room_is_a_reward_or_the_whole_way_is(modules: dict[str, Any]) -> None:
    right = modules["environment"].MAZES[1]
    wrong = [*right[:2], "up"]
    assert walk(modules, "Maze", right) == ([1 / 8] * 8, 0.0, "room H")
    assert walk(modules, "Maze", wrong) == ([1 / 8, 1 / 8, 0.0], 0.0, "room C")
    assert walk(modules, "OutcomeMaze", right) == ([None] * 8, 1.0, "room H")
    assert walk(modules, "OutcomeMaze", wrong) == ([None] * 3, 0.0, "room C")


@pytest.mark.slow
def test_a_random_walk_gets_further_within_a_few_steps(
    modules: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["prepare.py", "--output", str(tmp_path), "--steps", "200"])
    modules["prepare"].main()
    overrides = [f"model.path={tmp_path}/model", f"trainer.output_dir={tmp_path}/runs", "trainer.steps=12"]
    trained = RunDir(Trainer(load_config(FOLDER / "config.yaml", overrides)).fit())
    rooms = [line["reward/environment/rooms"] for line in trained.read_metrics() if "reward/mean" in line]
    assert rooms[0] < 0.8 and rooms[-1] > 1.2
