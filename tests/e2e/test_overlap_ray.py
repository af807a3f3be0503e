"""Real runs that sample while they train: engines and trainer in processes of their own."""

import signal
from collections.abc import Callable
from typing import Any

import pytest

from agentrl_core.runs.records import RolloutRecord, read_rollouts
from agentrl_core.runs.run_dir import RunDir

OVERLAPS = {
    "cluster.runtime": "ray",
    "rollout.engine.placement": "standalone",
    "rollout.max_staleness": 2,
    "algorithm.loss.name": "dppo",
    "trainer.steps": 5,
    "trainer.checkpoint": {"interval": 1},
    "trainer.validation": {"interval": 2},
    "data.validation_files": ["validation.jsonl"],
}


def trained(run: RunDir, steps: int) -> list[tuple[int, RolloutRecord]]:
    return [(step, record) for step in range(1, steps + 1) for record in read_rollouts(run.rollout_file(step, "train"))]


def check(run: RunDir, steps: int) -> None:
    """Each of 2 samples of 2 prompts a step is there once, and no token is too old."""
    records = trained(run, steps)
    ids = [record.trajectory_id for _, record in records]
    assert sorted(ids) == sorted(
        f"train-{step:06d}-{prompt:05d}-{sample:03d}" for step in range(1, steps + 1) for prompt in (0, 1)
        for sample in (0, 1)
    )  # fmt: skip
    for step, record in records:
        ages = [step - 1 - version for version in record.policy_versions if version >= 0]
        assert ages and 0 <= min(ages) and max(ages) <= 2


@pytest.mark.ray
def test_every_prompt_is_trained_once_and_no_token_is_too_old(fit: Callable[..., RunDir]) -> None:
    run = fit(OVERLAPS)
    check(run, 5)
    rows = [row for row in run.read_metrics() if row["step"]]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    for row in rows:
        assert row["staleness/max"] <= 2
        # Only rows of the newest weights are compared, and the engine has them.
        assert row.get("rollout/logprob_gap_max", 0.0) < 1e-3
    # The first batch is sampled with the weights that it updates; the second begins at the same time.
    assert rows[0]["staleness/max"] == 0
    assert max(row["staleness/max"] for row in rows) >= 1


@pytest.mark.ray
def test_a_killed_run_goes_on_with_the_prompts_that_it_has_not_trained(
    tiny_run: Any, start_agentrl: Callable[..., Any]
) -> None:
    tiny_run({**OVERLAPS, "hooks": ["./hooks.py:Pause"], "trainer.trackers": ["jsonl", "console"]})
    killed = start_agentrl("train", "config.yaml", TINY_PAUSE_AT="4")
    killed.read_until("paused at step 4")
    killed.process.kill()
    code, _ = killed.wait()
    assert code == -signal.SIGKILL
    code, output = start_agentrl("train", "config.yaml", "--resume").wait()
    assert code == 0, output
    check(RunDir(tiny_run.folder / "runs" / "tiny"), 5)
    assert "what would help most" in output or "neither trainer nor rollout waited" in output


@pytest.mark.ray
def test_a_deterministic_run_repeats_itself(fit: Callable[..., RunDir]) -> None:
    changes = {**OVERLAPS, "rollout.deterministic": True, "rollout.max_staleness": 1, "trainer.steps": 3}
    first, second = (fit({**changes, "trainer.name": name}) for name in ("first", "second"))
    for (_, one), (_, other) in zip(trained(first, 3), trained(second, 3), strict=True):
        assert (one.uid, one.response_ids, one.response_logprobs, one.policy_versions) == (
            other.uid, other.response_ids, other.response_logprobs, other.policy_versions,
        )  # fmt: skip
    weights = [[row.get("actor/grad_norm") for row in run.read_metrics()] for run in (first, second)]
    assert weights[0] == weights[1]
