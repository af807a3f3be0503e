"""The simulation of rollout and training at the same time: the real loop on a clock that only scripted times move."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def sim(import_script: Callable[[str], ModuleType]) -> ModuleType:
    return import_script("async_sim")


@pytest.fixture
def setting(sim: ModuleType) -> object:
    return sim.Setting("5% at 10x", batch_size=4, steps=6, slots=8, token_seconds=0.001, update_seconds=0.1)


def test_a_synchronous_step_takes_its_rollout_and_its_update(
    sim: ModuleType, setting: object, tiny_model: Path
) -> None:
    setting = replace(setting, mix="log-normal", batch_size=1, slots=4)  # type: ignore[type-var]
    outcome = sim.checked(sim.run(sim.SYNCHRONOUS, setting, tiny_model), setting)
    by_step = [0] * 6
    for name, length in setting.lengths.items():  # type: ignore[attr-defined]
        step = int(name.split("-")[1]) - 1
        by_step[step] = max(by_step[step], length)
    taken = [end - begin for begin, end in zip(outcome.begun, outcome.begun[1:], strict=False)]
    assert taken == pytest.approx([length / 1000 + 0.1 for length in by_step])


def test_a_run_repeats_exactly(sim: ModuleType, setting: object, tiny_model: Path) -> None:
    first, second = (sim.checked(sim.run(sim.Rule("deadline", 2, 1), setting, tiny_model), setting) for _ in range(2))
    assert (first.begun, first.ages, first.positions) == (second.begun, second.ages, second.positions)
    assert len(first.ages) == 6 and len(first.positions) == 24


@pytest.mark.parametrize("rule", [("drop", 1, 1), ("count", 10**6, 2)], ids=str)
def test_a_run_keeps_what_its_rule_promises(
    sim: ModuleType, setting: object, tiny_model: Path, rule: tuple[str, int, int]
) -> None:
    outcome = sim.checked(sim.run(sim.Rule(*rule), setting, tiny_model), setting)
    assert bool(outcome.dropped) == (rule[0] == "drop")


def test_a_run_that_breaks_its_promise_is_no_figure(sim: ModuleType, setting: object) -> None:
    lengths = setting.lengths  # type: ignore[attr-defined]
    good = sim.Outcome(sim.Rule("deadline", 1, 1), [0.0], [(0.5, 1.0)], [1], list(range(24)), lengths)
    assert sim.checked(good, setting) is good
    for broken in (
        replace(good, positions=[0, *range(23)]),
        replace(good, positions=list(range(23))),
        replace(good, lengths={**lengths, next(iter(lengths)): 1}),
    ):
        with pytest.raises(RuntimeError, match="not every trajectory that was sampled was trained exactly once"):
            sim.checked(broken, setting)
    for broken in (replace(good, token_ages=[2]), replace(good, ages=[(0.5, 2.0)])):
        with pytest.raises(RuntimeError, match="something of age 2 was trained"):
            sim.checked(broken, setting)


def test_the_distance_is_the_largest_of_the_distribution_functions(sim: ModuleType) -> None:
    assert sim.distance([1, 2, 3, 4], [4, 3, 2, 1]) == 0
    assert sim.distance([1, 1, 2, 2], [1, 2, 2, 2]) == 0.25
    assert sim.distance([1, 1], [2, 3]) == 1
