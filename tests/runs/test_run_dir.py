"""The run directory: records survive a kill, an earlier run and a resume."""

import errno
import fcntl
import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_core.api.errors import ConfigError, DataError
from agentrl_core.runs.run_dir import RunDir


def append(run: RunDir, row: dict[str, Any]) -> None:
    """As the tracker ``jsonl`` does, on a line of its own."""
    content = run.metrics_file.read_bytes() if run.metrics_file.exists() else b""
    end = b"\n" if content and not content.endswith(b"\n") else b""
    run.metrics_file.write_bytes(content + end + json.dumps(row).encode() + b"\n")


def a_run(path: Path, steps: int = 4) -> RunDir:
    """A directory as a run of so many steps leaves it, validated at every second step, checkpoints alike."""
    run = RunDir.create(path, "calculator")
    run.config_file.write_text("model: {}\n")
    run.rollouts_dir.mkdir()
    for step in range(steps + 1):
        append(run, {"step": step, "reward/mean": step / 10})
        run.append_phases(step, [("rollout", 1000.0 + step, 0.5)])
        run.rollout_file(step, "train").write_text(f"train {step}\n")
        if step % 2 == 0:
            run.rollout_file(step, "validation").write_text(f"validation {step}\n")
            (run.checkpoints_dir / f"step-{step:06d}").mkdir(parents=True)
    run.write_state("running", steps)
    return run


def all_files(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_layout_is_that_of_the_documentation(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "calculator")
    names = [
        run.config_file, run.lock_file, run.metrics_file, run.phases_file, run.rollouts_dir, run.checkpoints_dir,
        run.log_file, run.state_file, run.rollout_file(1, "train"), run.rollout_file(0, "validation"),
    ]  # fmt: skip
    assert [str(name.relative_to(tmp_path / "calculator")) for name in names] == [
        "config.yaml", "plugins.lock.json", "metrics.jsonl", "phases.jsonl", "rollouts", "checkpoints", "log.txt",
        "state.json",
        "rollouts/step-000001.jsonl", "rollouts/validation-step-000000.jsonl",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\\b", "/tmp"])
def test_create_refuses_a_name_that_is_no_single_directory(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="trainer.name"):
        RunDir.create(tmp_path, name)


def test_create_says_which_file_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(ConfigError, match="runs is a file"):
        RunDir.create(tmp_path / "runs", "calculator")


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_a_file_system_without_symbolic_links_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """vfat and exfat have none: a run would fail at its first checkpoint."""

    def symlink(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "symlink", symlink)
    with pytest.raises(ConfigError, match=r"trainer.output_dir: .* has no symbolic links.* Choose another"):
        RunDir.create(tmp_path, "calculator")


def test_state_tells_a_killed_run_from_a_completed_one(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "calculator")
    assert run.read_state() is None
    run.write_state("running", 3)
    killed = run.read_state()
    run.write_state("completed", 20)
    completed = run.read_state()
    assert killed and completed
    assert (killed.status, killed.step, killed.finished) == ("running", 3, False)
    assert (completed.status, completed.step, completed.finished) == ("completed", 20, True)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"status": "sleeping", "step": 1, "time": ""}', '{"status": "running"}']
)
def test_a_state_file_of_something_else_is_named(tmp_path: Path, content: str) -> None:
    run = RunDir.create(tmp_path, "calculator")
    run.state_file.write_text(content)
    with pytest.raises(DataError, match="state.json"):
        run.read_state()


def test_archive_moves_every_entry_and_changes_none(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    (run.path / "notes.txt").write_text("by hand")
    before = all_files(run.path)
    first = run.archive()
    assert first == run.path / "superseded" / "1"
    assert [entry.name for entry in run.path.iterdir()] == ["superseded"]
    assert all_files(first) == before
    assert run.archive() is None


def test_a_second_archive_stays_beside_the_first(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    run.archive()
    run = a_run(tmp_path)
    assert run.archive() == run.path / "superseded" / "2"
    assert sorted(entry.name for entry in run.superseded_dir.iterdir()) == ["1", "2"]


def test_archive_leaves_a_directory_that_is_no_run_alone(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "thesis")
    (run.path / "chapter1.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="chapter1.tex"):
        run.archive()
    assert [entry.name for entry in run.path.iterdir()] == ["chapter1.tex"]


def test_archive_of_an_empty_directory_does_nothing(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "calculator")
    (run.path / ".gitkeep").write_text("")
    assert run.archive() is None
    assert [entry.name for entry in run.path.iterdir()] == [".gitkeep"]


def test_supersede_moves_what_is_past_the_checkpoint(tmp_path: Path) -> None:
    run = a_run(tmp_path, steps=4)
    destination = run.supersede_after(2)
    assert destination == run.path / "superseded" / "1"
    later = RunDir(destination)
    assert [row["step"] for row in run.read_metrics()] == [0, 1, 2]
    assert [row["step"] for row in later.read_metrics()] == [3, 4]
    phases = [[json.loads(line)["step"] for line in each.phases_file.open()] for each in (run, later)]
    assert phases == [[0, 1, 2], [3, 4]]
    assert (run.rollout_steps("train"), run.rollout_steps("validation")) == ([0, 1, 2], [0, 2])
    assert (later.rollout_steps("train"), later.rollout_steps("validation")) == ([3, 4], [4])
    assert sorted(path.name for path in run.checkpoints_dir.iterdir()) == ["step-000000", "step-000002"]
    assert sorted(path.name for path in later.checkpoints_dir.iterdir()) == ["step-000004"]
    assert run.config_file.exists() and run.state_file.exists()


def test_supersede_without_later_records_does_nothing(tmp_path: Path) -> None:
    run = a_run(tmp_path, steps=4)
    before = all_files(run.path)
    assert run.supersede_after(4) is None
    assert RunDir.create(tmp_path, "new").supersede_after(4) is None
    assert all_files(run.path) == before


@settings(max_examples=40)
@given(cut=st.integers(min_value=0, max_value=400), step=st.integers(min_value=0, max_value=8))
def test_a_file_torn_anywhere_loses_nothing(tmp_path_factory: pytest.TempPathFactory, cut: int, step: int) -> None:
    run = RunDir.create(tmp_path_factory.mktemp("torn"), "calculator")
    for each in range(8):
        append(run, {"step": each, "reward/mean": 0.5, "ünïcode": "…"})
    content = run.metrics_file.read_bytes()[:cut]
    run.metrics_file.write_bytes(content)
    destination = run.supersede_after(step)
    moved = (destination / "metrics.jsonl").read_bytes() if destination else b""
    kept = run.metrics_file.read_bytes()
    assert [line for line in (kept + moved).split(b"\n") if line] == [line for line in content.split(b"\n") if line]
    assert all(json.loads(line)["step"] <= step for line in kept.splitlines())
    append(run, {"step": step + 1})
    assert run.read_metrics()[-1]["step"] == step + 1


@pytest.mark.parametrize("failing", range(5))
@pytest.mark.parametrize("operation", ["archive", "supersede"])
def test_cut_short_and_repeated_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, failing: int
) -> None:
    run = a_run(tmp_path, steps=6)
    before = sorted(all_files(run.rollouts_dir).values())
    rename, count = Path.rename, 0

    def killed(path: Path, target: Path) -> Path:
        nonlocal count
        count += 1
        if count > failing:
            raise KeyboardInterrupt
        return rename(path, target)

    def act() -> Path | None:
        return run.archive() if operation == "archive" else run.supersede_after(2)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        act()
    monkeypatch.undo()
    act()
    assert act() is None
    rollouts = [content for name, content in all_files(run.path).items() if "rollouts/" in name]
    assert sorted(rollouts) == before
    steps = {row["step"] for file in run.path.rglob("metrics.jsonl") for row in RunDir(file.parent).read_metrics()}
    assert steps == set(range(7))
    assert [row["step"] for row in run.read_metrics()] == ([] if operation == "archive" else [0, 1, 2])


def test_a_file_system_without_locks_gets_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    run = RunDir.create(tmp_path, "calculator")
    with caplog.at_level(logging.WARNING), run.locked():
        assert not run.is_in_use()
    assert "has no locks (No locks available)" in caplog.text and str(run.path) in caplog.text


def test_asking_whether_a_run_is_in_use_never_refuses_its_start(tmp_path: Path) -> None:
    """`runs list` takes a shared lock for a moment; a start in that moment must wait for it, not fail."""
    run = RunDir.create(tmp_path, "calculator")
    with run.locked():
        assert run.is_in_use()
    asked = (run.path / ".lock").open("rb")
    fcntl.flock(asked, fcntl.LOCK_SH)
    entered = threading.Event()

    def start() -> None:
        with RunDir(run.path).locked():
            entered.set()

    thread = threading.Thread(target=start)
    thread.start()
    # Whatever comes first: it must not have failed while somebody asks.
    thread.join(0.05)
    assert thread.is_alive()
    asked.close()
    assert entered.wait(60)
    thread.join()


def test_lost_records_are_named(tmp_path: Path) -> None:
    run = a_run(tmp_path, steps=4)
    assert run.lost_records() == []
    lines = run.metrics_file.read_bytes().splitlines(keepends=True)
    run.metrics_file.write_bytes(b"".join(lines[:2] + lines[4:]))
    run.config_file.write_text("model: {path: other}\n")
    lost = RunDir(run.path).lost_records()
    assert "metrics.jsonl holds no row of step 2-3" in lost[0] and "config.yaml is not as the run wrote it" in lost[1]
    # A later state does not forget what was lost.
    run.metrics_file.unlink()
    RunDir(run.path).write_state("running", 5)
    assert "metrics.jsonl is missing" in RunDir(run.path).lost_records()[0]


@pytest.mark.parametrize(("first", "last"), [(0, 10**18), (-(10**18), 2)])
def test_steps_that_nobody_could_count_are_named_as_ranges(tmp_path: Path, first: int, last: int) -> None:
    run = RunDir(tmp_path)
    run.metrics_file.write_text('{"step": 0}\n{"step": 2}\n')
    state = {"status": "completed", "step": last, "time": "now", "first_metrics": first}
    run.state_file.write_text(json.dumps(state))
    lost = run.lost_records()[0]
    assert "no row of step" in lost and (f"1, 3-{last}" if last > 2 else f"{first}--1, 1,") in lost


@pytest.mark.parametrize("name", ["state.json", "metrics.jsonl", "config.yaml"])
def test_what_is_no_file_keeps_nobody_waiting(tmp_path: Path, name: str) -> None:
    run = RunDir(tmp_path)
    os.mkfifo(tmp_path / name)
    os.mkfifo(tmp_path / ".lock")
    assert not run.is_in_use()
    if name == "state.json":
        with pytest.raises(DataError, match="no regular file"):
            run.read_state()
    elif name == "metrics.jsonl":
        with pytest.raises(OSError, match="no regular file"):
            run.read_metrics()
    else:
        run.write_state("running", 1)
        assert run.changed_config() == []
