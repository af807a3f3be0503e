"""Runs that go on from a checkpoint, and why some may not."""

import functools
import hashlib
import json
import logging
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import CheckpointError, ConfigError, PluginDriftError, RolloutError
from agentrl_core.config import load_config
from agentrl_core.fsdp2.checkpoints import save_training_state
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.trainer import Trainer
from agentrl_core.trainer.checkpoint import (
    CHECKSUM_FILE,
    STATE_FILE,
    Position,
    checkpoint_path,
    read_state,
    resumed_state,
)
from agentrl_core.trainer.disks import Disks
from agentrl_core.trainer.run import Run
from agentrl_core.workers.actor import ActorWorker
from agentrl_testing.tiny_model import save_tiny_model

Fit = Callable[..., RunDir]
EVERY_STEP = {"trainer.checkpoint": {"interval": 1}, "rollout.engine": {"name": "scripted"}}
RESUME = {**EVERY_STEP, "trainer.resume": "auto", "trainer.steps": 3}


def steps_of(run: RunDir) -> list[int]:
    return [row["step"] for row in run.read_metrics()]


def links(run: RunDir) -> dict[str, str]:
    return {entry.name: entry.resolve().name for entry in run.checkpoints_dir.iterdir() if entry.is_symlink()}


def rewrite(file: Path, text: str) -> None:
    """Replace a file of a checkpoint, as if the run had written it so."""
    file.write_text(text)
    checksums = json.loads((file.parent / CHECKSUM_FILE).read_text())
    checksums[file.name] = hashlib.sha256(text.encode()).hexdigest()
    (file.parent / CHECKSUM_FILE).write_text(json.dumps(checksums))


def test_layout(fit: Fit) -> None:
    run = fit(EVERY_STEP)
    latest = run.checkpoints_dir / "latest"
    assert {file.name for file in latest.iterdir()} == {
        "actor", "trainer.json", "checksums.json", "config.yaml", "plugins.lock.json",
    }  # fmt: skip
    held = {file.name for file in (latest / "actor").iterdir()}
    assert {"model.safetensors", "config.json", "training", "tokenizer.json", "chat_template.jinja"} <= held


def test_newest_are_kept(fit: Fit) -> None:
    run = fit({**EVERY_STEP, "trainer.steps": 4, "trainer.checkpoint.keep": 2})
    assert sorted(entry.name for entry in run.checkpoints_dir.iterdir() if not entry.is_symlink()) == [
        "step-000003",
        "step-000004",
    ]


def test_best_is_kept_and_what_is_best_survives_a_resume(fit: Fit) -> None:
    best = {
        "data.validation_files": ["validation.jsonl"],
        "trainer.validation": {"interval": 1, "before": False},
        "trainer.checkpoint": {"interval": 0, "keep": 1, "best_metric": "validation/tiny/accuracy_greedy"},
        "rollout.engine": {"name": "scripted"},
    }
    run = fit({**best, "trainer.steps": 3})
    # The accuracy never changes, so the first is the best: an equal one is no better.
    assert links(run) == {"latest": "step-000003", "best": "step-000001"}
    fit({**best, "trainer.steps": 4, "trainer.resume": "auto"})
    assert links(run) == {"latest": "step-000004", "best": "step-000001"}


def test_resume_goes_on_after_the_newest_checkpoint(fit: Fit) -> None:
    fit({**EVERY_STEP, "trainer.steps": 2})
    run = fit(RESUME)
    assert steps_of(run) == run.rollout_steps("train") == [1, 2, 3]
    assert not run.superseded_dir.exists()


def test_resume_auto_without_a_checkpoint_starts_afresh(fit: Fit) -> None:
    assert steps_of(fit(RESUME)) == [1, 2, 3]


def test_resume_from_an_earlier_checkpoint_supersedes_what_came_after(fit: Fit) -> None:
    run = fit({**EVERY_STEP, "trainer.steps": 3})
    fit({**RESUME, "trainer.resume": str(run.checkpoints_dir / "step-000001"), "trainer.steps": 2})
    assert steps_of(run) == [1, 2]
    assert links(run) == {"latest": "step-000002"}
    old = RunDir(run.superseded_dir / "1")
    assert steps_of(old) == old.rollout_steps("train") == [2, 3]
    assert {path.name for path in old.checkpoints_dir.iterdir()} == {"step-000002", "step-000003"}


def test_latest_is_right_as_soon_as_a_run_resumes(fit: Fit) -> None:
    run = fit({**EVERY_STEP, "trainer.steps": 3})
    broken = {"rollout.engine": {"name": "scripted", "config": {"fail_every": 1}}}
    with pytest.raises(Exception, match="as scripted"):
        fit({**RESUME, **broken, "trainer.resume": str(run.checkpoints_dir / "step-000001")})
    assert links(run) == {"latest": "step-000001"}


def test_run_in_a_linked_directory_resumes_in_place(fit: Fit, tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "tiny").mkdir(parents=True)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "tiny").symlink_to(tmp_path / "elsewhere" / "tiny")
    run = fit({**EVERY_STEP, "trainer.steps": 2})
    fit({**RESUME, "trainer.resume": str(run.path)})
    assert steps_of(run) == [1, 2, 3]


def test_checkpoint_of_another_run(fit: Fit) -> None:
    first = fit({**EVERY_STEP, "trainer.steps": 2})
    second = fit({**RESUME, "trainer.resume": str(first.path), "trainer.name": "second"})
    assert steps_of(second) == [3]
    assert steps_of(first) == [1, 2]


def test_no_step_left_is_an_error_and_changes_nothing(fit: Fit) -> None:
    run = fit(EVERY_STEP)
    before = run.state_file.read_text()
    message = r"trainer.steps: nothing left to run: .*step-000002 is at step 2 of 1. Raise"
    with pytest.raises(ConfigError, match=message):
        fit({**EVERY_STEP, "trainer.resume": "auto", "trainer.steps": 1})
    assert run.state_file.read_text() == before
    assert steps_of(run) == [1, 2]


@pytest.mark.parametrize("status", ["completed", "running"])
def test_earlier_run_in_the_directory_is_archived(fit: Fit, caplog: pytest.LogCaptureFixture, status: Any) -> None:
    run = fit(EVERY_STEP)
    run.write_state(status, 1)
    with caplog.at_level(logging.INFO):
        fit({**EVERY_STEP, "trainer.steps": 1})
    assert steps_of(run) == [1]
    assert steps_of(RunDir(run.superseded_dir / "1")) == [1, 2]
    hint = "moved an unfinished run (step 1) from"
    assert (hint in caplog.text) == (status == "running")
    assert ("instead of starting again: --resume" in caplog.text) == (status == "running")


def test_changed_data_warns(fit: Fit, tiny_run: Any, caplog: pytest.LogCaptureFixture) -> None:
    fit(EVERY_STEP)
    fit(RESUME, tiny_run.rows(7))
    assert "the training data differs from that of" in caplog.text


def test_rows_that_were_drawn_from_other_data_are_drawn_anew(fit: Fit, tiny_run: Any) -> None:
    run = fit({**EVERY_STEP, "trainer.steps": 1})
    checkpoint = run.checkpoints_dir / "step-000001"
    state = json.loads((checkpoint / STATE_FILE).read_text())
    state["position"] = {"frontier": 2, "beyond": [], "drawn": {"2": [5, 4]}, "rewards": {"3": [1.0]}}
    rewrite(checkpoint / STATE_FILE, json.dumps(state))
    config = load_config(tiny_run(RESUME))
    same, other = (resumed_state(config, checkpoint, data) for data in (state["data_fingerprint"], "other"))
    assert same.position == Position(2, [], {"2": [5, 4]}, {"3": [1.0]})
    assert other.position == Position(2)


def test_resuming_reports_what_has_changed(fit: Fit, caplog: pytest.LogCaptureFixture) -> None:
    run = fit(EVERY_STEP)
    assert run.config_file.stat().st_mode & 0o777 == 0o600
    fit({**RESUME, "rollout.sampling.temperature": 0.5})
    assert "rollout.sampling.temperature: 1.0 -> 0.5" in caplog.text


def test_an_option_that_is_younger_than_the_checkpoint_has_not_changed(
    fit: Fit, caplog: pytest.LogCaptureFixture
) -> None:
    run = fit(EVERY_STEP)
    kept = run.checkpoints_dir / "latest" / "config.yaml"
    older = [line for line in kept.read_text().splitlines() if line.strip() != "streaming: false"]
    assert len(older) < len(kept.read_text().splitlines())
    rewrite(kept, "\n".join(older))
    assert steps_of(fit(RESUME)) == [1, 2, 3]
    assert "streaming" not in caplog.text


def test_resuming_refuses_another_reference_than_the_adapter_that_the_run_began_with(fit: Fit) -> None:
    adapted = {"model.adapter": {"rank": 2}, "algorithm.kl_coef": 0.1, "rollout.n": 2}
    began = fit({**EVERY_STEP, **adapted, "trainer.name": "first", "trainer.steps": 1})
    stored = {**adapted, "model.adapter": {"rank": 2, "path": str(began.checkpoints_dir / "step-000001" / "actor")}}
    fit({**EVERY_STEP, **stored, "trainer.steps": 1})
    with pytest.raises(ConfigError, match=r"another adapter:\n  model\.adapter\.path: \S+ -> None"):
        fit({**RESUME, **adapted})


@pytest.mark.parametrize(
    "change", [{"trainer.seed": 5}, {"data.batch_size": 1}, {"data.sampler.name": "sequential"}], ids=str
)
def test_resuming_refuses_another_order_of_the_data(fit: Fit, change: dict[str, Any]) -> None:
    fit(EVERY_STEP)
    with pytest.raises(ConfigError, match=rf"another order of the data:\n  {next(iter(change))}: "):
        fit({**RESUME, **change})


def test_changed_plugins_are_refused_until_allowed(fit: Fit) -> None:
    run = fit(EVERY_STEP)
    lock = run.checkpoints_dir / "latest" / "plugins.lock.json"
    content = json.loads(lock.read_text())
    for plugin in content["plugins"]:
        if plugin["name"] == "single_turn":
            plugin["version"] = "0.0.1"
    rewrite(lock, json.dumps(content))
    with pytest.raises(
        PluginDriftError,
        match=r"(?s)was made with other plugins:\n  agent loop 'single_turn': "
        r"agentrl-loop-single-turn 0.0.1 -> .*\n"
        r"Install those versions again, or accept the change with --allow-plugin-drift \(plugins.allow_drift=true\)",
    ):
        fit(RESUME)
    assert steps_of(run) == [1, 2]
    assert steps_of(fit({**RESUME, "plugins.allow_drift": True})) == [1, 2, 3]


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("actor/training/.metadata", Path.unlink, r"actor/training: cannot be read .*take another one"),
        ("actor/training/.metadata", truncate, r"actor/training: cannot be read .*take another one"),
        ("actor/training/__0_0.distcp", Path.unlink, r"actor/training: cannot be read .*take another one"),
        ("actor/training/__0_0.distcp", truncate, r"actor/training: cannot be read .*take another one"),
        ("trainer.json", Path.unlink, r"trainer.json is damaged: it is missing.*trainer.resume=intact"),
        ("trainer.json", truncate, r"trainer.json is damaged: .*trainer.resume=PATH"),
        ("plugins.lock.json", truncate, r"plugins.lock.json is damaged: .*trainer.resume=PATH"),
    ],
)
def test_corrupt_checkpoint(fit: Fit, file: str, damage: Callable[[Path], None], message: str) -> None:
    run = fit({**EVERY_STEP, "trainer.steps": 1})
    damage(run.checkpoints_dir / "latest" / file)
    with pytest.raises(CheckpointError, match=message):
        fit(RESUME)


def flip(file: Path) -> None:
    """64 bytes in the middle, with the size as it was."""
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(255 - byte for byte in content[middle : middle + 64])
    file.write_bytes(content)


@pytest.mark.parametrize("file", ["actor/model.safetensors", "actor/training/__0_0.distcp"])
def test_flipped_bytes_are_found_and_an_older_checkpoint_is_used_on_request(
    fit: Fit, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = fit({**EVERY_STEP, "trainer.steps": 2})
    latest = run.checkpoints_dir / "latest"
    flip(latest / file)
    with pytest.raises(CheckpointError, match=r"is damaged: it differs from its checksum.*trainer.resume=intact"):
        fit({**RESUME, "trainer.steps": 3})
    with pytest.raises(CheckpointError, match="differs from its checksum"):
        checkpoint_path(latest)  # as `agentrl eval` and `export` do
    assert steps_of(fit({**RESUME, "trainer.steps": 3, "trainer.resume": "intact"})) == [1, 2, 3]
    assert "step-000002" in caplog.text and "Trying the checkpoint before it" in caplog.text


def test_intact_runs_the_last_steps_again_where_their_checkpoint_is_damaged(fit: Fit) -> None:
    run = fit({**EVERY_STEP, "trainer.steps": 2})
    assert steps_of(fit({**RESUME, "trainer.steps": 2, "trainer.resume": "intact"})) == [1, 2]
    assert not run.superseded_dir.exists()  # all steps ran: nothing to do
    flip(run.checkpoints_dir / "latest" / "actor" / "model.safetensors")
    assert steps_of(fit({**RESUME, "trainer.steps": 2, "trainer.resume": "intact"})) == [1, 2]
    assert checkpoint_path(run.checkpoints_dir / "latest").name == "step-000002"  # whole again


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        ({"num_hidden_layers": 3}, {}, r"num_hidden_layers: 3 -> 2"),
        ({}, {"num_hidden_layers": 3}, r"num_hidden_layers: 2 -> 3"),
        ({"tie_word_embeddings": False}, {}, r"tie_word_embeddings: False -> True"),
    ],
)
def test_another_model_does_not_take_what_fits(
    fit: Fit, tmp_path: Path, then: dict[str, Any], now: dict[str, Any], message: str
) -> None:
    """With fewer layers, or one matrix for embedding and output, part of what was trained would be lost."""
    fit({**EVERY_STEP, "trainer.steps": 1, "model.path": save_tiny_model(tmp_path / "then", **then)})
    with pytest.raises(
        ConfigError, match=rf"model.path: .*now is another model than that of .*step-000001:\n  {message}"
    ):
        fit({**RESUME, "model.path": save_tiny_model(tmp_path / "now", **now)})


def test_what_changed_since_the_checkpoint_is_in_the_log_file(fit: Fit) -> None:
    fit({**EVERY_STEP, "trainer.steps": 1})
    run = fit({**RESUME, "actor.optimizer": {"lr": 0.5}})
    assert re.search(r"changed since .*actor.optimizer.lr: .* -> 0.5", run.log_file.read_text())


def test_where_every_checkpoint_is_damaged_nothing_starts_anew(fit: Fit) -> None:
    run = fit({**EVERY_STEP, "trainer.steps": 1})
    flip(run.checkpoints_dir / "latest" / "actor" / "model.safetensors")
    with pytest.raises(CheckpointError, match="differs from its checksum"):
        fit({**RESUME, "trainer.resume": "intact"})


def test_critic_is_missing_in_the_checkpoint(fit: Fit) -> None:
    fit(EVERY_STEP)
    with pytest.raises(CheckpointError, match="has no critic, which this run needs"):
        fit({**RESUME, "algorithm.advantage": "gae", "plugins.allow_drift": True})


@pytest.mark.parametrize(("lost", "message"), [
    ("actor/model.safetensors", "model.safetensors, which a rank wrote, is missing"),
    ("actor/training/__0_0.distcp", "__0_0.distcp, which a rank wrote, is missing"),
])  # fmt: skip
def test_files_that_stay_on_another_node_are_missed_before_they_are_sealed(
    fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str, message: str
) -> None:
    """What a rank writes to its own disk never arrives in the directory of the process that keeps the checkpoint."""

    def collect(disks: Disks, folder: Path) -> set[str]:
        (folder / lost).unlink()
        return set()

    monkeypatch.setattr(Disks, "collect", collect)
    with pytest.raises(CheckpointError, match=f"{message}.*: what the training processes wrote is not complete here"):
        fit(EVERY_STEP)
    assert list((tmp_path / "runs" / "tiny" / "checkpoints").iterdir()) == []


def test_full_disk_ends_the_run_and_leaves_the_last_checkpoint(
    fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(path: Path, *state: Any) -> None:
        if "step-000003" in str(path):
            raise OSError(28, "No space left on device")
        save_training_state(str(path), *state)

    monkeypatch.setattr("agentrl_core.fsdp2.backend.save_training_state", save)
    with pytest.raises(CheckpointError, match="step-000003 cannot be written: .*No space left"):
        fit({**EVERY_STEP, "trainer.steps": 3})
    checkpoints = tmp_path / "runs" / "tiny" / "checkpoints"
    assert (checkpoints / "latest").resolve() == checkpoints / "step-000002"
    assert sorted(entry.name for entry in checkpoints.iterdir()) == ["latest", "step-000001", "step-000002"]


def test_training_goes_on_while_a_checkpoint_is_written_and_the_end_waits_for_it(
    fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first checkpoint is held up until the second step has been trained, and has the state of the first."""
    trained, steps = threading.Event(), []
    update = ActorWorker.update

    def noted(worker: ActorWorker, batch: Any) -> Any:
        metrics = update(worker, batch)
        steps.append(len(steps) + 1)
        if len(steps) == 2:
            trained.set()
        return metrics

    def save(path: str, *state: Any) -> None:
        assert trained.wait(60), "training waits for the checkpoint"
        save_training_state(path, *state)

    monkeypatch.setattr(ActorWorker, "update", functools.wraps(update)(noted))
    monkeypatch.setattr("agentrl_core.fsdp2.backend.save_training_state", save)
    changes = {
        "trainer.steps": 2, "trainer.checkpoint.interval": 1, "actor.optimizer.lr": 0.01, "rollout.deterministic": True,
    }  # fmt: skip
    run = fit(changes)
    first, second = (run.checkpoints_dir / f"step-00000{step}" for step in (1, 2))
    assert checkpoint_path(first) and checkpoint_path(second)
    alone = fit({**changes, "trainer.steps": 1, "trainer.name": "alone"})
    weights = "actor/model.safetensors"
    assert (first / weights).read_bytes() == (alone.checkpoints_dir / "step-000001" / weights).read_bytes()
    assert (first / weights).read_bytes() != (second / weights).read_bytes()


def test_a_write_that_fails_in_the_background_ends_the_run_at_the_next_step(
    fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(path: str, *state: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("agentrl_core.fsdp2.backend.save_training_state", save)
    # The second step must find the failure, however quick it is.
    monkeypatch.setattr(Run, "publish_checkpoint", waiting(Run.publish_checkpoint))
    with pytest.raises(CheckpointError, match="step-000001 cannot be written: .*No space left"):
        fit({"trainer.steps": 5, "trainer.checkpoint.interval": 1})
    run = RunDir(tmp_path / "runs" / "tiny")
    assert [row["step"] for row in run.read_metrics()] == [1]
    assert list(run.checkpoints_dir.iterdir()) == []


def waiting(publish: Callable[..., Any]) -> Callable[..., Any]:
    return lambda run, wait: publish(run, True)


def test_an_error_elsewhere_does_not_cost_the_checkpoint_that_is_being_written(
    fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(trainer: Trainer, step: int, results: Any) -> None:
        if step == 2:
            raise RolloutError("too many failed")
        return score(trainer, step, results)

    score = Trainer.score
    monkeypatch.setattr(Trainer, "score", fail)
    monkeypatch.setattr(Run, "publish_checkpoint", late(Run.publish_checkpoint))
    with pytest.raises(RolloutError, match="too many failed"):
        fit({"trainer.steps": 3, "trainer.checkpoint.interval": 1})
    latest = tmp_path / "runs" / "tiny" / "checkpoints" / "latest"
    assert read_state(checkpoint_path(latest)).step == 1


def late(publish: Callable[..., Any]) -> Callable[..., Any]:
    """As if the checkpoint were never whole before somebody waits for it."""
    return lambda run, wait: publish(run, True) if wait else None


KILLED = """
import os, signal, sys
from agentrl_core.config import load_config
from agentrl_core.trainer import Trainer
from agentrl_core.fsdp2 import backend

save = backend.save_training_state

def killed(path, *state):
    if "step-000002" in path:
        # Weights are there already, the rest is not.
        os.kill(os.getpid(), signal.SIGKILL)
    save(path, *state)

backend.save_training_state = killed
Trainer(load_config(sys.argv[1], ["trainer.steps=3", "trainer.checkpoint.interval=1"])).fit()
"""


def test_a_kill_during_the_write_leaves_the_older_checkpoint_whole(tiny_run: Any, fit: Fit, tmp_path: Path) -> None:
    path = tiny_run({})
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)], cwd=tmp_path, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    checkpoints = tmp_path / "runs" / "tiny" / "checkpoints"
    assert (checkpoints / ".step-000002.writing" / "actor" / "model.safetensors").is_file()
    assert checkpoint_path(checkpoints / "latest") == checkpoints / "step-000001"
    run = fit({"trainer.steps": 3, "trainer.resume": "auto", "trainer.checkpoint.interval": 1})
    assert [row["step"] for row in run.read_metrics()] == [1, 2, 3]
    assert not (checkpoints / ".step-000002.writing").exists()
