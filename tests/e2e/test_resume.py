"""A killed run, resumed, repeats the uninterrupted one."""

import signal
from collections.abc import Callable
from typing import Any

import pytest
from safetensors.torch import load_file

from agentrl_core.runs.records import read_rollouts
from agentrl_core.runs.run_dir import RunDir

RESUMABLE = {
    "rollout.deterministic": True,
    "trainer.steps": 6,
    "trainer.checkpoint": {"interval": 2},
    "trainer.validation": {"interval": 3, "before": True},
    "data.validation_files": ["validation.jsonl"],
    "data.overlong_prompts": "error",
    "hooks": ["./hooks.py:Pause"],
    "trainer.trackers": ["jsonl", "console"],
}
PPO = {
    "data.sampler": "curriculum",
    "algorithm.advantage": "gae",
    "critic.optimizer.lr": 1e-3,
    "actor.optimizer": {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 2},
    "actor.mini_batches": 2,
}


def measured(run: RunDir) -> dict[int, dict[str, Any]]:
    """What a run measured, by step, without what depends on the clock."""
    return {
        row["step"]: {
            key: value for key, value in row.items() if key != "time" and not key.startswith(("timing/", "perf/"))
        }
        for row in run.read_metrics()
    }


def sampled(run: RunDir, step: int) -> list[Any]:
    records = read_rollouts(run.rollout_file(step, "train"))
    return [[record.uid, record.response_ids, record.response_logprobs] for record in records]


STREAMED = {"data.streaming": True}


@pytest.mark.parametrize("changes", [{}, PPO, STREAMED], ids=["grpo", "ppo with a curriculum", "streamed"])
def test_killed_run_repeats_the_uninterrupted_one_from_its_last_checkpoint(
    changes: dict[str, Any], fit: Callable[..., RunDir], tiny_run: Any, start_agentrl: Callable[..., Any]
) -> None:
    whole = fit({**RESUMABLE, **changes, "trainer.name": "whole"})

    tiny_run({**RESUMABLE, **changes})
    killed = start_agentrl("train", "config.yaml", TINY_PAUSE_AT="6")
    killed.read_until("paused at step 6")
    killed.process.kill()
    code, _ = killed.wait()
    assert code == -signal.SIGKILL
    run = RunDir(tiny_run.folder / "runs" / "tiny")
    assert list(measured(run)) == [0, 1, 2, 3, 4, 5]
    state = run.read_state()
    assert state is not None and (state.status, state.step) == ("running", 5)

    # A busy machine may still have been writing that of step 4.
    saved = int((run.checkpoints_dir / "latest").resolve().name.removeprefix("step-"))
    assert saved in (2, 4)
    code, output = start_agentrl("train", "config.yaml", "--resume").wait()
    assert code == 0, output
    assert f"resuming from {run.checkpoints_dir / f'step-{saved:06d}'}" in output
    assert measured(run) == measured(whole)
    for step in range(1, 7):
        assert sampled(run, step) == sampled(whole, step)
    (superseded,) = run.superseded_dir.iterdir()
    lost = list(range(saved + 1, 6))
    assert list(measured(RunDir(superseded))) == lost
    assert RunDir(superseded).rollout_steps("train") == lost
    state = run.read_state()
    assert state is not None and (state.status, state.step) == ("completed", 6)


def test_a_run_with_an_adapter_killed_twice_ends_as_the_uninterrupted_one(
    fit: Callable[..., RunDir], tiny_run: Any, start_agentrl: Callable[..., Any]
) -> None:
    adapter = {"model.adapter": {"rank": 4, "dropout": 0.2}, "actor.optimizer.lr": 3e-2}
    whole = fit({**RESUMABLE, **adapter, "trainer.name": "whole"})
    tiny_run({**RESUMABLE, **adapter})
    for step, resume in ((4, ()), (6, ("--resume",))):
        killed = start_agentrl("train", "config.yaml", *resume, TINY_PAUSE_AT=str(step))
        killed.read_until(f"paused at step {step}")
        killed.process.kill()
        assert killed.wait()[0] == -signal.SIGKILL
    code, output = start_agentrl("train", "config.yaml", "--resume").wait()
    assert code == 0, output
    run = RunDir(tiny_run.folder / "runs" / "tiny")
    assert measured(run) == measured(whole)
    assert [sampled(run, step) for step in range(1, 7)] == [sampled(whole, step) for step in range(1, 7)]
    files = (each.checkpoints_dir / "latest" / "actor" / "adapter_model.safetensors" for each in (run, whole))
    stored, expected = files
    assert stored.read_bytes() == expected.read_bytes()
    assert any(tensor.any() for name, tensor in load_file(stored).items() if "lora_B" in name)
