"""What happens to a run's directory when two runs want it, a start fails, or a process is killed."""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import ConfigError, EngineError
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.trainer.checkpoint import CheckpointStore, TrainerState

Fit = Callable[..., RunDir]
EVERY_STEP = {"trainer.checkpoint": {"interval": 1}, "rollout.engine": {"name": "scripted"}}
RESUME = {**EVERY_STEP, "trainer.resume": "auto"}


def status_of(run: RunDir) -> tuple[str, int]:
    state = run.read_state()
    assert state is not None
    return state.status, state.step


def steps_of(run: RunDir) -> list[int]:
    return [row["step"] for row in run.read_metrics()]


def test_the_same_name_started_twice_is_refused_and_the_first_run_goes_on(
    fit: Fit, tiny_run: Any, start_agentrl: Callable[..., Any]
) -> None:
    tiny_run({**EVERY_STEP, "hooks": ["./hooks.py:Pause"], "trainer.steps": 2})
    first = start_agentrl("train", "config.yaml", TINY_PAUSE_AT="1")
    first.read_until("paused at step 1")
    with pytest.raises(ConfigError, match=rf"process {first.process.pid} on .* is training in .*tiny. Stop that"):
        fit(EVERY_STEP)
    os.kill(first.process.pid, signal.SIGTERM)
    first.wait()
    run = RunDir(tiny_run.folder / "runs" / "tiny")
    assert status_of(run) == ("stopped", 1) and not run.superseded_dir.exists()


NO_GPU = """
from agentrl_core.api import EngineError
from agentrl_testing.scripted_config import ScriptedConfig
from agentrl_testing.scripted_engine import ScriptedEngine

class NoGPU(ScriptedEngine):
    config_class = ScriptedConfig
    capabilities = frozenset({"weight_update"})

    async def start(self):
        raise EngineError("no GPU is free")
"""


def test_a_failed_start_leaves_the_good_run_where_it_is_and_resume_continues_it(fit: Fit, tiny_run: Any) -> None:
    run = fit(EVERY_STEP)
    (tiny_run.folder / "engine.py").write_text(NO_GPU)
    with pytest.raises(EngineError, match="no GPU is free"):
        fit({**EVERY_STEP, "rollout.engine": {"name": "./engine.py:NoGPU"}})
    assert status_of(run) == ("completed", 2) and steps_of(run) == [1, 2] and not run.superseded_dir.exists()
    assert re.search("the run did not start: .*no GPU is free", run.log_file.read_text())
    assert steps_of(fit({**RESUME, "trainer.steps": 3})) == [1, 2, 3]


def test_a_run_killed_after_its_last_checkpoint_is_closed_by_resume_with_the_metrics_it_owed(fit: Fit) -> None:
    run = fit(EVERY_STEP)
    whole = run.read_metrics()
    # As SIGKILL between the last checkpoint's rename and everything that follows it leaves the directory.
    run.write_state("running", 1)
    run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in whole[:-1]))
    (run.checkpoints_dir / "latest").unlink()
    (run.checkpoints_dir / "latest").symlink_to("step-000001")
    fit(RESUME)
    assert status_of(run) == ("completed", 2)
    assert (run.checkpoints_dir / "latest").resolve().name == "step-000002"
    again = run.read_metrics()
    assert [row["step"] for row in again] == [1, 2]
    assert again[-1]["reward/mean"] == whole[-1]["reward/mean"]


@pytest.mark.parametrize("kept", [1, 2])
def test_a_kill_while_checkpoints_are_pruned_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    run = RunDir.create(tmp_path, "tiny")
    store = CheckpointStore(run.checkpoints_dir, keep=kept)

    def write(directory: Path) -> None:
        (directory / "weights").write_text("w")

    for step in range(1, kept + 1):
        store.save(TrainerState(step, None, None, "data"), write)

    def killed(path: Path, **options: Any) -> None:
        if path.exists() and "writing" not in path.name:
            (path / "weights").unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr("agentrl_core.trainer.checkpoint.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        store.save(TrainerState(kept + 1, None, None, "data"), write)
    monkeypatch.undo()
    assert store.steps() == list(range(2, kept + 2))
    assert all((store.path(step) / "weights").exists() for step in store.steps())
    run.remove_leftovers()
    whole = {f"step-{step:06d}" for step in store.steps()} | {"latest"}
    assert {entry.name for entry in run.checkpoints_dir.iterdir()} == whole


def test_leftovers_of_a_killed_run_are_gone_after_the_next_start(fit: Fit) -> None:
    run = fit(EVERY_STEP)
    for name in (".metrics.jsonl.tmp", "rollouts/.step-000003.jsonl.tmp", "checkpoints/.latest.link"):
        (run.path / name).write_text("")
    (run.checkpoints_dir / ".step-000003.writing" / "actor").mkdir(parents=True)
    fit({**RESUME, "trainer.steps": 3})
    left = [path for folder in (run.path, run.rollouts_dir, run.checkpoints_dir) for path in folder.glob(".*")]
    assert left == [run.path / ".lock"]


def test_timing_of_a_checkpoint_stands_in_the_line_of_its_step(fit: Fit) -> None:
    rows = fit({"trainer.checkpoint": {"interval": 2}, "rollout.engine": {"name": "scripted"}, "trainer.steps": 3})
    timed = [row["step"] for row in rows.read_metrics() if "timing/checkpoint" in row]
    assert timed == [2, 3]


def test_a_killed_run_is_known_as_interrupted(tiny_run: Any, start_agentrl: Callable[..., Any]) -> None:
    tiny_run({**EVERY_STEP, "hooks": ["./hooks.py:Pause"]})
    started = start_agentrl("train", "config.yaml", TINY_PAUSE_AT="2")
    started.read_until("paused at step 2")
    run = RunDir(tiny_run.folder / "runs" / "tiny")
    assert run.is_in_use() and run.shown_status() == "running"
    started.process.kill()
    started.wait()
    assert not run.is_in_use() and run.shown_status() == "interrupted"
