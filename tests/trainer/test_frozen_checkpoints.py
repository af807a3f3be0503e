"""Frozen weights are written into the first checkpoint of a run, and shared by all later ones."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentrl_core.api import CheckpointError
from agentrl_core.api.errors import ConfigError
from agentrl_core.runs.atomic import flushed_checksum
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.trainer.checkpoint import checkpoint_path, read_checksums
from agentrl_core.trainer.disks import Disks
from agentrl_testing.tiny_vision import save_tiny_vision_model
from tests.trainer.test_checkpoints import EVERY_STEP, flip, steps_of

Frozen = Callable[..., RunDir]
FILES = "actor/frozen-00001-of-00001.safetensors", "actor/training/frozen/__0_0.distcp"


@pytest.fixture(scope="session")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_vision_model(tmp_path_factory.mktemp("vision"), initializer_range=0.1)


@pytest.fixture
def frozen(fit: Callable[..., RunDir], vision_model: str) -> Frozen:
    """A run whose vision tower is frozen, with a checkpoint after each step."""

    def run(**changes: Any) -> RunDir:
        return fit({**EVERY_STEP, **settings_of(vision_model), **changes})

    return run


def settings_of(vision_model: str) -> dict[str, Any]:
    return {"model.path": vision_model, "model.freeze": ["vision"], "actor.optimizer.lr": 0.01}


def step(run: RunDir, number: int) -> Path:
    return run.checkpoints_dir / f"step-{number:06d}"


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_checkpoints_share_the_files_and_hash_them_once(
    frozen: Frozen, vision_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[str] = []

    def noted(path: Path) -> str:
        hashed.append(str(path).partition("step-")[2])
        return flushed_checksum(path)

    for module in ("workers.model_worker", "trainer.checkpoint"):
        monkeypatch.setattr(f"agentrl_core.{module}.flushed_checksum", noted)
    run = frozen(**{"trainer.steps": 3, "trainer.checkpoint.keep": 3, "rollout.engine": {"name": "hf"}})
    before = weights_of(Path(vision_model))
    for number in (1, 2, 3):
        after = weights_of(checkpoint_path(step(run, number)) / "actor")
        assert after.keys() == before.keys()
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert moved and not any("visual" in name for name in moved)
    for file in FILES:
        assert len({(step(run, number) / file).stat().st_ino for number in (1, 2, 3)}) == 1
        assert len([name for name in hashed if name.endswith(file)]) == 1
    trained = "actor/model-00001-of-00001.safetensors"
    assert not any("visual" in name for name in load_file(step(run, 3) / trained))
    assert not any(".visual." in name for name in state_names(step(run, 3) / "actor" / "training"))


def state_names(folder: Path) -> set[str]:
    from agentrl_core.fsdp2.checkpoints import MetadataReader

    return set(MetadataReader(folder).read_metadata().state_dict_metadata)


def test_older_checkpoints_may_go(frozen: Frozen) -> None:
    run = frozen(**{"trainer.steps": 3, "trainer.checkpoint.keep": 1})
    assert {entry.name for entry in run.checkpoints_dir.iterdir()} == {"step-000003", "latest"}
    assert all((step(run, 3) / file).stat().st_nlink == 1 for file in FILES)
    # A run that resumes shares them with the checkpoint that it resumes from.
    kept = {file: (step(run, 3) / file).stat().st_ino for file in FILES}
    frozen(**{"trainer.steps": 4, "trainer.checkpoint.keep": 1, "trainer.resume": "auto"})
    assert steps_of(run) == [1, 2, 3, 4] and not step(run, 3).exists()
    assert kept == {file: (checkpoint_path(step(run, 4)) / file).stat().st_ino for file in FILES}


def deleted(checkpoint: Path) -> None:
    checkpoint.rename(checkpoint.with_name("deleted"))


def lost(checkpoint: Path) -> None:
    (checkpoint / FILES[0]).unlink()


def cut(checkpoint: Path) -> None:
    os.truncate(checkpoint / FILES[1], 10)


@pytest.mark.parametrize("harm", [deleted, lost, cut])
def test_a_checkpoint_that_somebody_deletes_or_damages_is_not_needed(
    frozen: Frozen, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path], None], vision_model: str
) -> None:
    from agentrl_core.trainer.run import Run

    publish = Run.publish_checkpoint

    def harmed(run: Run, wait: bool) -> Any:
        published = publish(run, True)
        if published is not None and published[0] == 1:
            harm(published[1])
        return published

    monkeypatch.setattr(Run, "publish_checkpoint", harmed)
    run = frozen(**{"trainer.steps": 2})
    assert all((checkpoint_path(step(run, 2)) / file).stat().st_nlink == 1 for file in FILES)
    assert weights_of(step(run, 2) / "actor").keys() == weights_of(Path(vision_model)).keys()


def test_weights_that_were_frozen_have_no_moments_to_go_on_with(frozen: Frozen) -> None:
    run = frozen(**{"trainer.steps": 1})
    with pytest.raises(ConfigError, match=r"model.freeze: found \[\], but .*step-000001 was made with \['vision'\]"):
        frozen(**{"trainer.steps": 2, "trainer.resume": "auto", "model.freeze": []})
    frozen(**{
        "trainer.steps": 1, "trainer.name": "thawed", "trainer.resume": "never", "model.freeze": [],
        "model.path": str(step(run, 1) / "actor"),
    })  # fmt: skip


def test_without_hard_links_they_are_copied(frozen: Frozen, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr("os.link", link)
    run = frozen(**{"trainer.steps": 2})
    first, second = (checkpoint_path(step(run, number)) for number in (1, 2))
    for file in FILES:
        assert (first / file).read_bytes() == (second / file).read_bytes()
        assert (first / file).stat().st_ino != (second / file).stat().st_ino
        assert read_checksums(first)[file] == read_checksums(second)[file] == flushed_checksum(second / file)


def test_a_node_that_does_not_share_the_disk_sends_them_once(frozen: Frozen, monkeypatch: pytest.MonkeyPatch) -> None:
    """All files of the actor come from elsewhere, as :class:`Disks` moves them."""
    came: list[set[str]] = []

    def collect(disks: Disks, folder: Path) -> set[str]:
        came.append({str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} - shared(folder))
        return came[-1]

    def shared(folder: Path) -> set[str]:
        return {file for file in FILES if (folder / file).exists() and (folder / file).stat().st_nlink > 1}

    monkeypatch.setattr(Disks, "collect", collect)
    run = frozen(**{"trainer.steps": 2})
    assert set(FILES) <= came[0] and not set(FILES) & came[1] and len(came) == 2
    assert checkpoint_path(step(run, 2))


@pytest.mark.parametrize("file", FILES)
def test_damage_is_found_in_all_checkpoints_that_share_it(frozen: Frozen, file: str) -> None:
    run = frozen(**{"trainer.steps": 2})
    flip(step(run, 1) / file)
    for resume in ("auto", "intact"):
        with pytest.raises(CheckpointError, match=rf"{Path(file).name} is damaged: it differs from its checksum"):
            frozen(**{"trainer.steps": 3, "trainer.resume": resume})


def test_what_was_frozen_goes_on_without_the_model_that_it_came_from(
    frozen: Frozen, vision_model: str, tmp_path: Path
) -> None:
    run = frozen(**{"trainer.steps": 1})
    # The scripted engine's samples teach nothing.
    expected = weights_of(step(run, 1) / "actor")
    other = save_tiny_vision_model(tmp_path / "other", initializer_range=0.3)
    frozen(**{"trainer.steps": 2, "trainer.resume": "auto", "model.path": other})
    for name, tensor in weights_of(step(run, 2) / "actor").items():
        assert torch.equal(tensor, expected[name]), name


KILLED = """
import os, signal, sys
from agentrl_core.config import load_config
from agentrl_core.trainer import Trainer
from agentrl_core.fsdp2 import backend

save = backend.save_training_state

def killed(path, *state):
    if f"step-00000{sys.argv[2]}" in path and len(state) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    save(path, *state)

backend.save_training_state = killed
Trainer(load_config(sys.argv[1], ["trainer.steps=3", "trainer.checkpoint.interval=1"])).fit()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("at", "arguments"), [(2, 2), (1, 3)], ids=["the second", "the first, at its frozen weights"])
def test_a_kill_during_the_write_leaves_the_older_checkpoint_whole(
    tiny_run: Any, frozen: Frozen, vision_model: str, tmp_path: Path, at: int, arguments: int
) -> None:
    path = tiny_run({"rollout.engine": {"name": "scripted"}, **settings_of(vision_model)})
    command = [sys.executable, "-c", KILLED, str(path), str(at), str(arguments)]
    killed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    checkpoints = tmp_path / "runs" / "tiny" / "checkpoints"
    assert (checkpoints / f".step-00000{at}.writing" / "actor" / "model.safetensors.index.json").is_file()
    if at > 1:
        assert checkpoint_path(checkpoints / "latest") == checkpoints / "step-000001"
    run = frozen(**{"trainer.steps": 3, "trainer.resume": "auto"})
    assert steps_of(run) == [1, 2, 3] and checkpoint_path(step(run, 3))
