"""Checkpoints on disk: whole or absent, the newest few and the best."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import save_file

from agentrl_core.api import CheckpointError, WorkerError
from agentrl_core.controller.runtime import ActorDiedError
from agentrl_core.trainer.checkpoint import CheckpointStore, TrainerState, checkpoint_path, read_state


def state(step: int, best_step: int | None = None) -> TrainerState:
    return TrainerState(step, None if best_step is None else 0.5, best_step, "data")


def write(directory: Path) -> None:
    (directory / "actor").mkdir()
    (directory / "actor" / "config.json").write_text("{}")
    save_file({"weight": torch.zeros(1)}, directory / "actor" / "model.safetensors")
    for name in ("config.yaml", "plugins.lock.json"):
        (directory / name).write_text("{}")


def contents(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()}


def test_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    for step in range(1, 7):
        store.save(state(step, best_step=min(step, 2)), write)
    assert store.steps() == [2, 5, 6]
    assert (store.directory / "latest").resolve() == store.path(6)
    assert (store.directory / "best").resolve() == store.path(2)
    assert contents(store.directory) == {"step-000002", "step-000005", "step-000006", "latest", "best"}


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 4), st.lists(st.booleans(), min_size=1, max_size=8))
def test_what_is_kept_and_linked(tmp_path_factory: pytest.TempPathFactory, keep: int, is_best: list[bool]) -> None:
    store = CheckpointStore(tmp_path_factory.mktemp("run"), keep)
    best = None
    for step, better in enumerate(is_best, start=1):
        best = step if better else best
        store.save(state(step, best), lambda directory: None)
    last = len(is_best)
    newest = set(range(max(1, last - keep + 1), last + 1))
    assert set(store.steps()) == newest | ({best} if best else set())
    assert (store.directory / "latest").resolve().name == f"step-{last:06d}"
    assert (store.directory / "best").exists() == (best is not None)


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), SafetensorError("I/O error"), RuntimeError("PytorchStreamWriter")]
)
def test_failing_write_leaves_the_old_checkpoints_and_nothing_half(tmp_path: Path, error: Exception) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(state(1), write)

    def fails(directory: Path) -> None:
        write(directory)
        raise error

    with pytest.raises(CheckpointError, match=r"step-000002 cannot be written: .*Check space and rights there"):
        store.save(state(2), fails)
    assert contents(tmp_path) == {"step-000001", "latest"}
    assert read_state(checkpoint_path(tmp_path / "latest")) == state(1)


def test_what_several_ranks_could_not_write_has_a_reason(tmp_path: Path) -> None:
    """As a group reports it."""
    store = CheckpointStore(tmp_path, keep=1)

    def fails(directory: Path) -> None:
        raise WorkerError(
            "rank 1 of 'actor', in 'checkpoint_written':\nOSError: [Errno 28] No space left on device\n"
            "Also failed: rank 0 of 2 of 'actor'"
        )

    with pytest.raises(CheckpointError, match=r"cannot be written: OSError: .* No space left on device. Check space"):
        store.save(state(1), fails)


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), ActorDiedError("rank 0 of 'actor': it died")])
def test_interrupted_write_leaves_nothing_half(tmp_path: Path, interruption: BaseException) -> None:
    """Nor does it put the blame on the disk."""

    def interrupted(directory: Path) -> None:
        write(directory)
        raise interruption

    with pytest.raises(type(interruption)):
        CheckpointStore(tmp_path, keep=1).save(state(1), interrupted)
    assert contents(tmp_path) == set()


def test_half_written_checkpoint_of_a_killed_run_is_passed_over_and_written_again(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    store.save(state(1), write)
    (tmp_path / ".step-000002.writing" / "actor").mkdir(parents=True)
    assert store.find("auto") == store.path(1)
    store.save(state(2), write)
    assert contents(tmp_path) == {"step-000001", "step-000002", "latest"}


def test_best_does_not_point_past_the_step_that_is_resumed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    store.save(state(1, best_step=1), write)
    store.save(state(2, best_step=2), write)
    store.path(2).rename(tmp_path / "superseded")
    store.mark(state(1, best_step=1))
    assert (tmp_path / "latest").resolve() == (tmp_path / "best").resolve() == store.path(1)
    store.mark(state(1))
    assert not (tmp_path / "best").is_symlink()


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_fresh_start(tmp_path: Path, resume: str) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    assert store.find(resume) is None
    store.save(state(1), write)
    assert (store.find(resume) is None) == (resume == "never")


@pytest.mark.parametrize("below", ["", "checkpoints/latest", "checkpoints/step-000003"])
def test_path_of_a_run_or_a_checkpoint(tmp_path: Path, below: str) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    store.save(state(3), write)
    assert store.find(str(tmp_path / below)) == store.path(3)


@pytest.mark.parametrize("path", ["absent", "."])
def test_path_that_is_no_checkpoint(tmp_path: Path, path: str) -> None:
    with pytest.raises(
        CheckpointError, match=r"is no checkpoint: it has no trainer.json. Expected a directory such as"
    ):
        checkpoint_path(tmp_path / path)


def cut(text: str) -> str:
    return text[: len(text) // 2]


def without_step(text: str) -> str:
    return json.dumps({key: value for key, value in json.loads(text).items() if key != "step"})


@pytest.mark.parametrize("damage", [cut, without_step, lambda text: "null"], ids=["cut", "no step", "null"])
def test_damaged_trainer_state(tmp_path: Path, damage: Callable[[str], str]) -> None:
    path = CheckpointStore(tmp_path, keep=1).save(state(1), write)
    file = path / "trainer.json"
    file.write_text(damage(file.read_text()))
    with pytest.raises(CheckpointError, match=r"trainer.json is damaged: .* Resume from another checkpoint"):
        read_state(path)
