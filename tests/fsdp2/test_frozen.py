"""Frozen weights in checkpoints, on several ranks: written once, restored bit for bit by any number of them."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.numpy import load_file

from agentrl_core.fsdp2 import backend as module
from agentrl_testing.ranks import on_ranks
from agentrl_testing.tiny_vision import save_tiny_vision_model
from tests.fsdp2.ranks import Arrays, Case, Row, backend_of, loss_of, micros_of, wanted

FOLDER = "training/frozen/"


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_vision_model(tmp_path_factory.mktemp("vision"), initializer_range=0.1)


def state_of(backend: Any) -> Arrays:
    """All weights and moments."""
    state = {**dict(backend._model.named_parameters()), **backend._optimizer.moments()}
    whole = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in state.items()}
    return {name: each.detach().numpy().copy() for name, each in whole.items()}


def snapshot(backend: Any, folder: str, last: list[str], ranks: int) -> list[str]:
    """The names of the files that all ranks have written, and of those that they keep."""
    backend.last_files = last
    own = list(backend.snapshot()(folder))
    reported: list[list[str]] = [own] * ranks
    if ranks > 1:
        dist.all_gather_object(reported, own)
    return [*(name for names in reported for name in names), *backend.kept_files]


def saved(
    rank: int, ranks: int, path: str, rows: list[Row], head: str, folder: str, options: dict[str, int]
) -> tuple[list[list[str]], Arrays]:
    """What three checkpoints report, each after a step, and the state in the end."""
    case = Case(path, rows, options, model={"freeze": ["vision"]}, head=head)
    backend = backend_of(case, rank, ranks)
    backend.load()
    micros = micros_of(rows, backend.share.index, backend.share.count)
    reported: list[list[str]] = [[]]
    for step in range(3):
        with backend.on_device(), backend.updating(step):
            backend.forward_backward(micros, wanted(), lambda n, out, at=step: loss_of(micros[n], out, at))  # type: ignore[misc]
            backend.optimizer_step(0.1, 1.0)
        backend.steps += 1
        reported.append(snapshot(backend, f"{folder}/{step}", reported[-1], ranks))
    return reported[1:], state_of(backend)


def resumed(
    rank: int, ranks: int, path: str, head: str, folder: str, last: list[str], options: dict[str, int]
) -> tuple[int, list[str], Arrays]:
    """The steps and state that a checkpoint gives, and what the next one reports."""
    backend = backend_of(Case(path, [], options, model={"freeze": ["vision"]}, head=head), rank, ranks)
    backend.load()
    with torch.no_grad():
        for parameter in backend._model.parameters():
            parameter.fill_(7.0)
    backend.restore(folder)
    state = state_of(backend)
    return backend.steps, snapshot(backend, folder + "-next", last, ranks), state


def share(earlier: Path, later: Path, names: list[str]) -> None:
    """As the core does it."""
    for name in names:
        if not (later / name).exists():
            (later / name).parent.mkdir(parents=True, exist_ok=True)
            os.link(earlier / name, later / name)


def files_in(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "head", "options"),
    [
        (2, 1, "tokens", {}),
        (1, 2, "values", {}),
        (2, 4, "tokens", {"replicas": 2}),
    ],
)
def test_they_are_written_once_and_restored_bit_for_bit(
    vision: str, rows: list[Row], tmp_path: Path, before: int, after: int, head: str, options: dict[str, int]
) -> None:
    (reported, state), *_ = on_ranks(before, saved, vision, rows, head, str(tmp_path), {})
    first, second, third = (tmp_path / str(step) for step in range(3))
    frozen = {name for name in reported[0] if name.startswith(("frozen-", FOLDER))}
    assert {f"{FOLDER}__{rank}_0.distcp" for rank in range(before)} <= frozen and len(frozen) == before + 2
    assert set(reported[0]) == files_in(first)
    for later in (1, 2):
        assert set(reported[later]) == set(reported[0])
        assert files_in(tmp_path / str(later)) == set(reported[0]) - frozen
    share(first, third, reported[2])
    stored = {name: each for file in third.glob("*.safetensors") for name, each in load_file(file).items()}
    original = load_file(Path(vision) / "model.safetensors")
    towers = {name for name in original if "visual" in name}
    assert towers and all(np.array_equal(stored[name], original[name]) for name in towers)

    (steps, next_files, found), *_ = on_ranks(after, resumed, vision, head, str(third), reported[2], options)
    assert steps == 3 and found.keys() == state.keys()
    for name, tensor in state.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)
    # The next checkpoint takes over what another number of ranks has written.
    assert frozen <= set(next_files) and not frozen & files_in(Path(f"{third}-next"))


def saved_as_before(rank: int, ranks: int, path: str, rows: list[Row], folder: str) -> Arrays:
    """A checkpoint as versions before this one wrote it: all weights in one state."""
    copied_state = module.copied_state

    def all_of(model: Any, *args: Any) -> Any:
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(True)
        state = copied_state(model, *args)
        for parameter in frozen:
            parameter.requires_grad_(False)
        return state

    with patch.multiple(module, frozen_weights=lambda model: {}, copied_state=all_of):
        return saved(rank, ranks, path, rows, "tokens", folder, {})[1]


def test_an_older_checkpoint_has_them_among_the_others_and_the_next_one_apart(
    vision: str, rows: list[Row], tmp_path: Path
) -> None:
    state, *_ = on_ranks(2, saved_as_before, vision, rows, str(tmp_path))
    older = tmp_path / "2"
    assert (older / "model.safetensors").is_file() and not (older / FOLDER).exists()
    (steps, next_files, found), *_ = on_ranks(1, resumed, vision, "tokens", str(older), sorted(files_in(older)), {})
    assert steps == 3
    for name, tensor in state.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)
    assert FOLDER + ".metadata" in next_files and set(next_files) == files_in(Path(f"{older}-next"))
