"""Weights in files that are overwritten in place."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from agentrl_core.api import ArrayBucket, EngineError, WeightUpdate, map_safetensors
from agentrl_core.workers import weight_files
from agentrl_core.workers.weight_files import WeightFiles
from agentrl_core.workers.weights import ModelFiles, iter_weight_buckets


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 3)
        self.norm = torch.nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.empty = torch.nn.Parameter(torch.empty(0))
        self.head = torch.nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight


def loaded(paths: tuple[str, ...]) -> dict[str, torch.Tensor]:
    return {name: tensor for path in paths for name, tensor in load_file(path).items()}


@pytest.fixture
def files(tmp_path: Path):
    made = WeightFiles(1000, tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("bucket_bytes", [0, 50, 2**20])
@pytest.mark.parametrize("file_bytes", [1, 90, 2**20])
def test_updates_overwrite_the_same_files(
    files: WeightFiles, bucket_bytes: int, file_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "FILE_BYTES", file_bytes)
    model = Tied()
    first = files.write(iter_weight_buckets(model, bucket_bytes))
    inodes = [os.stat(path).st_ino for path in first]
    mapped = [map_safetensors(path) for path in first]
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        paths = files.write(iter_weight_buckets(model, bucket_bytes))
        assert paths == first and [os.stat(path).st_ino for path in paths] == inodes
        tensors = loaded(paths)
        assert set(tensors) == {"embed.weight", "norm", "empty"}
        assert all(torch.equal(tensors[name], model.state_dict()[name]) for name in tensors)
        # Who has mapped a file sees the new bytes: nothing is copied on that side.
        seen = {name: data for bucket in mapped for name, _, _, data in bucket.tensors()}
        assert np.array_equal(seen["embed.weight"], model.embed.weight.detach().numpy().reshape(-1).view(np.uint8))
    assert {name for bucket in WeightUpdate(files=first) for name in bucket.names} == set(tensors)


def bucket(name: str, values: int) -> ArrayBucket:
    return ArrayBucket((name,), ((values,),), ("float32",), np.zeros(4 * values, np.uint8))


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ([bucket("a", 2), bucket("c", 3)], r"c \[3\] float32 came where the first update had b \[3\] float32"),
        ([bucket("a", 2), bucket("b", 4)], r"b \[4\] float32 came where the first update had b \[3\] float32"),
        ([bucket("a", 2)], "b is missing"),
        ([bucket("a", 2), bucket("b", 3), bucket("c", 1)], "c is new"),
    ],
)
def test_another_set_of_tensors_is_refused_by_name(files: WeightFiles, second: list, message: str) -> None:
    files.write([bucket("a", 2), bucket("b", 3)])
    with pytest.raises(EngineError, match=message):
        files.write(second)


def test_a_full_file_system_is_an_error_with_a_remedy(files: WeightFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(EngineError, match="No space left on device.*TMPDIR"):
        files.write([bucket("a", 2)])


def test_without_room_in_memory_the_files_go_to_the_temporary_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files.tempfile, "gettempdir", lambda: str(tmp_path))
    huge = WeightFiles(2**60)
    try:
        assert huge.directory.parent == tmp_path
    finally:
        huge.close()


def test_closing_removes_the_files(tmp_path: Path) -> None:
    files = WeightFiles(1000, tmp_path)
    files.write([bucket("a", 2)])
    files.close()
    files.close()
    assert not files.directory.exists()


def test_a_killed_process_leaves_no_files_behind(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from agentrl_core.workers.weight_files import WeightFiles\n"
        "files = WeightFiles(1000, pathlib.Path(sys.argv[1])); print(files.directory, flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    directory = Path(process.stdout.readline().strip())
    assert directory.is_dir()
    process.send_signal(signal.SIGKILL)
    # The output ends when the last process that holds it does; the one that clears up holds none of it.
    process.communicate()
    wait_until_gone(directory)


def wait_until_gone(directory: Path) -> None:
    """Another process removes it; there is nothing to wait on but the directory."""
    import time

    deadline = time.monotonic() + 30
    while directory.exists():
        assert time.monotonic() < deadline, f"{directory} is still there"
        time.sleep(0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_files_of_a_model_are_its_weights_after_every_update(dtype: torch.dtype) -> None:
    model = Tied().to(dtype)
    files = ModelFiles(model)
    try:
        first = files.write()
        for _ in range(3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_()
            assert files.write() == first
            tensors = loaded(first)
            assert set(tensors) == {"embed.weight", "norm", "empty"}
            assert all(torch.equal(tensors[name], model.state_dict()[name]) for name in tensors)
        model.norm = torch.nn.Parameter(torch.zeros(7, dtype=dtype))
        with pytest.raises(EngineError, match=r"norm \[7\].* came where the first update had norm"):
            files.write()
    finally:
        files.close()
    assert not Path(first[0]).exists()


def test_weights_that_the_files_hold_in_another_form_are_never_copied_as_they_are(monkeypatch) -> None:
    model = torch.nn.Linear(3, 3, bias=False)

    def transposed(model, bucket_bytes):
        data = model.weight.detach().T.contiguous().numpy().reshape(-1).view("uint8")
        yield ArrayBucket(("weight",), ((3, 3),), ("float32",), data)

    monkeypatch.setattr("agentrl_core.workers.weights.iter_weight_buckets", transposed)
    files = ModelFiles(model)
    try:
        for _ in range(3):
            torch.nn.init.normal_(model.weight)
            assert torch.equal(loaded(files.write())["weight"], model.weight.T)
    finally:
        files.close()
