"""The Kuhn poker example: its environment keeps the contract, its measure is exact, and it trains by self-play."""

import importlib
import math
import sys
from collections.abc import Iterator, Mapping
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import EnvironmentContext, NoConfig, RewardTrajectory
from agentrl_core.config import load_config
from agentrl_core.plugins.resolution import resolve
from agentrl_core.runs.records import read_rollouts
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.trainer import Trainer
from agentrl_testing.contracts import EnvironmentCase, EnvironmentContract
from agentrl_testing.contracts.case import PluginContract, run

FOLDER = Path(__file__).parents[2] / "examples/kuhn_poker"
SCRIPTS = ("environment", "exploitability", "prepare")
OUTCOMES = {"pp": 1, "bp": 1, "pbp": -1, "bb": 2, "pbb": 2}
"""What the first player wins with the higher card."""


class Example(EnvironmentCase):
    def make(self) -> Any:
        plugin = resolve("environment", "./environment.py:KuhnPoker", base_dir=FOLDER)
        return plugin.build(NoConfig(), EnvironmentContext("KuhnPoker"))


CASE = Example(
    resolve("environment", "./environment.py:KuhnPoker", base_dir=FOLDER).spec,
    tasks=(2, 4, 5),
    oracle=lambda task, seed, messages: ["bet", "bet"],
    high=2.0,
    low=-2.0,
)  # fmt: skip
CHECKS = sorted(name for name in set(dir(EnvironmentContract)) - set(dir(PluginContract)) if name.startswith("test_"))


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mapping[str, Any]]:
    """The modules of the example by name, imported as its scripts import each other."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = {name: sys.modules.pop(name) for name in SCRIPTS if name in sys.modules}
    yield {name: importlib.import_module(name) for name in SCRIPTS}
    for name in SCRIPTS:
        sys.modules.pop(name)
    sys.modules.update(before)


def nash(alpha: float) -> dict[str, float]:
    """The equilibria of Kuhn poker, one for each alpha from 0 to 1/3: probabilities of a bet."""
    first = {"J": alpha, "Q": 0.0, "K": 3 * alpha, "Jpb": 0.0, "Qpb": alpha + 1 / 3, "Kpb": 1.0}
    return first | {"Jp": 1 / 3, "Qp": 0.0, "Kp": 1.0, "Jb": 0.0, "Qb": 1 / 3, "Kb": 1.0}


@pytest.mark.parametrize("check", CHECKS)
def test_the_environment_keeps_the_contract(check: str) -> None:
    getattr(EnvironmentContract(), check)(CASE)


@pytest.mark.parametrize("history", OUTCOMES)
@pytest.mark.parametrize("cards", list(permutations("JQK", 2)))
def test_a_hand_pays_what_the_rules_say(history: str, cards: tuple[str, str]) -> None:
    hand = run(CASE.hosted().environment.open({"cards": list(cards)}, 0))
    mover = "first"
    for number, action in enumerate(history, start=1):
        said = {"p": "pass", "b": "bet"}[action]
        turn = run(hand.reply([{"role": "assistant", "content": said}]))
        assert (
            turn.terminate == (number == len(history)) and turn.agent == {"first": "second", "second": "first"}[mover]
        )
        mover = turn.agent
    folded = history.endswith("bp")
    won = OUTCOMES[history] * (1 if folded or "JQK".index(cards[0]) > "JQK".index(cards[1]) else -1)
    for agent, expected in (("first", won), ("second", -won)):
        assert run(hand.score(RewardTrajectory([], "", "", "", agent=agent))) == expected


def test_each_player_is_told_its_own_card_only() -> None:
    hand = run(CASE.hosted().environment.open({"cards": ["Q", "K"]}, 0))
    assert (hand.agent, hand.messages) == ("first", [{"role": "user", "content": "first Q"}])
    answers = [run(hand.reply([{"role": "assistant", "content": said}])).text for said in ("pass", "bet")]
    assert answers == ["second K pass", "bet"]


def test_uniform_play_is_exploitable_by_eleven_24ths_of_an_ante(scripts: Mapping[str, Any]) -> None:
    measure = scripts["exploitability"]
    assert measure.exploitability(dict.fromkeys(nash(0), 0.5)) == pytest.approx(11 / 24)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 1 / 3])
def test_equilibria_are_not_exploitable(scripts: Mapping[str, Any], alpha: float) -> None:
    assert scripts["exploitability"].exploitability(nash(alpha)) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("bet", "expected"), [(0.0, 1.0), (1.0, 1 / 3)])
def test_players_who_always_do_the_same(scripts: Mapping[str, Any], bet: float, expected: float) -> None:
    """One who always passes loses every ante to bets. Against one who always bets, J folds, and Q and K call: that wins
    -1 in a third of the hands, 0 in another, and 2 in the last."""
    assert scripts["exploitability"].exploitability(dict.fromkeys(nash(0), bet)) == pytest.approx(expected)


def test_a_deviation_costs_what_it_costs_by_hand(scripts: Mapping[str, Any]) -> None:
    """K folds to a bet. Then the first player wins 1/6 with J and 2/6 with Q by betting, and 7/18 with K either way.
    The second one still wins the 1/18 of the game."""
    measure, broken = scripts["exploitability"], nash(0) | {"Kb": 0.0}
    assert [measure.best_response(broken, 0, card) for card in "JQK"] == pytest.approx([1 / 6, 2 / 6, 7 / 18])
    assert measure.exploitability(broken) == pytest.approx((8 / 9 + 1 / 18) / 2)


def test_of_each_is_above_the_value_of_the_game(scripts: Mapping[str, Any]) -> None:
    """The second player's error costs the second player only: the first one then wins 8/9 in place of losing 1/18."""
    measure = scripts["exploitability"]
    assert measure.of_each(dict.fromkeys(nash(0), 0.5)) == pytest.approx((13 / 36, 5 / 9))
    assert measure.of_each(nash(1 / 3)) == pytest.approx((0, 0), abs=1e-12)
    assert measure.of_each(nash(0) | {"Kb": 0.0}) == pytest.approx((0, 8 / 9 + 1 / 18), abs=1e-12)
    assert measure.of_each(nash(0) | {"Kpb": 0.0})[1] == pytest.approx(0, abs=1e-12)


def test_the_average_weighs_policies_by_how_often_they_get_there(scripts: Mapping[str, Any]) -> None:
    never, always = nash(0) | {"K": 0.75, "Kpb": 0.0}, nash(0) | {"K": 0.25, "Kpb": 1.0}
    mean = scripts["exploitability"].average([never, always])
    assert mean["K"] == 0.5 and mean["Kpb"] == pytest.approx(0.75)
    assert mean["Qpb"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("config", ["config.yaml", "two_policies.yaml"])
def test_the_model_of_the_script_begins_with_uniform_play_and_trains_by_self_play(
    config: str,
    scripts: Mapping[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    measure = scripts["exploitability"]
    monkeypatch.setattr("sys.argv", ["prepare.py", "--output", str(tmp_path), "--steps", "400"])
    scripts["prepare"].main()
    policy, no_action = measure.policy_of(tmp_path / "model")
    assert set(policy) == set(nash(0)) and no_action < 0.02
    assert measure.exploitability(policy) == pytest.approx(11 / 24, abs=0.03)
    overrides = [
        f"model.path={tmp_path}/model",
        f"trainer.output_dir={tmp_path}/runs",
        "trainer.steps=2",
        "rollout.n=4",
    ]
    trained = RunDir(Trainer(load_config(FOLDER / config, overrides)).fit())
    records = list(read_rollouts(trained.rollout_file(1, "train")))
    assert {record.agent for record in records} == {"first", "second"} and len(records) == 2 * 6 * 4
    assert {record.uid for record in records} == {f"train-000001-{p:05d}@{a}" for p in range(6)
                                                 for a in ("first", "second")}  # fmt: skip
    assert sum(record.reward or 0 for record in records) == 0, "what one wins the other one loses"
    monkeypatch.setattr("sys.argv", ["exploitability.py", str(trained.path)])
    measure.main()
    step, single, average, first, second, _ = capsys.readouterr().out.splitlines()[-1].split()
    assert step == "2" and math.isclose(float(single), float(average)) and 0 < float(single) < 1
    assert float(average) == pytest.approx((float(first) + float(second)) / 2, abs=2e-3)
    (checkpoint,) = trained.path.glob("checkpoints/step-*")
    if config == "two_policies.yaml":
        own = {player: measure.policy_of(checkpoint / "policies" / player)[0] for player in ("first", "second")}
        joint, _ = measure.policy_at(checkpoint)
        assert {key: own["second" if key[1:] in ("p", "b") else "first"][key] for key in joint} == joint
        assert own["first"] != own["second"]
