"""From a random model to one that does what is rewarded."""

from collections.abc import Callable
from typing import Any

import pytest

from agentrl_core.runs.records import read_rollouts
from agentrl_core.runs.run_dir import RunDir
from tests.trainer.test_profile import durations

LEARN = {
    "data.batch_size": 4,
    "rollout.n": 8,
    "rollout.max_response_length": 6,
    "actor.optimizer.lr": 1e-2,
    "trainer.steps": 40,
}


def test_grpo_learns_to_write_lower_case_letters(fit: Callable[..., RunDir]) -> None:
    rewards = [row["reward/mean"] for row in fit(LEARN).read_metrics()]
    assert sum(rewards[:3]) / 3 < 0.25
    assert sum(rewards[-3:]) / 3 > 0.8


def drawn(run: RunDir, step: int) -> list[tuple[str, str, float | None]]:
    records = read_rollouts(run.rollout_file(step, "train"))
    return [(record.uid, record.prompt_text, record.reward) for record in records]


@pytest.mark.slow
@pytest.mark.ray
def test_ray_trains_on_what_the_local_runtime_does_also_after_a_resume(
    fit: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {"rollout.deterministic": True, "hooks": ["./hooks.py:Signals"], "trainer.steps": 4}
    monkeypatch.setenv("TINY_SIGNALS", "{}")
    local = fit({**changes, "trainer.name": "local"})
    changes = {**changes, "cluster.runtime": "ray", "trainer.name": "ray"}
    monkeypatch.setenv("TINY_SIGNALS", '{"on_rollout_start:2": [15]}')
    fit(changes)
    monkeypatch.setenv("TINY_SIGNALS", "{}")
    on_ray = fit({**changes, "trainer.resume": "auto"})
    assert [row["step"] for row in on_ray.read_metrics()] == [1, 2, 3, 4]
    for step in (1, 2, 3, 4):
        assert [entry[:2] for entry in drawn(on_ray, step)] == [entry[:2] for entry in drawn(local, step)]
    assert drawn(on_ray, 1) == drawn(local, 1)
    assert on_ray.read_metrics()[0]["rollout/logprob_gap_max"] < 1e-4


def assert_every_rank_has_its_profile(run: RunDir, step: int) -> None:
    folder = run.path / f"profiles/step-{step:06d}"
    assert sorted(file.name for file in folder.glob("*.json.gz")) == [
        "actor-rank-0.json.gz", "actor-rank-1.json.gz", "driver.json.gz",
    ]  # fmt: skip
    ranks = [durations(folder / f"actor-rank-{rank}.json.gz")["aten::mm"] for rank in (0, 1)]
    assert len({event["pid"] for events in ranks for event in events}) == 2


@pytest.mark.ray
def test_two_processes_train_on_what_one_does_and_learn_and_write_their_profiles(
    fit: Callable[..., RunDir], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {**LEARN, "rollout.deterministic": True, "trainer.steps": 15}
    one = fit({**changes, "trainer.steps": 1, "trainer.name": "one"}).read_metrics()[0]
    ray: dict[str, Any] = {"cluster.runtime": "ray", "cluster.processes_per_node": 2, "trainer.name": "two"}
    run = fit({**changes, **ray, "trainer.profile.steps": [2]})
    assert_every_rank_has_its_profile(run, 2)
    two = run.read_metrics()
    same = [key for key in one if key.startswith(("actor/", "reward/", "response_length/", "advantage/"))]
    assert {"actor/loss", "actor/grad_norm", "reward/mean"} <= set(same)
    assert {key: two[0][key] for key in same} == pytest.approx({key: one[key] for key in same}, abs=1e-4, rel=1e-4)
    rewards = [row["reward/mean"] for row in two]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2
    resumed = fit({**changes, "trainer.steps": 16, "trainer.name": "two", "trainer.resume": "auto"})
    assert resumed.read_metrics()[-1]["reward/mean"] == pytest.approx(rewards[-1], abs=0.15)
