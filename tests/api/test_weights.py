import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl_core.api import ArrayBucket, EngineError, WeightUpdate, map_safetensors
from agentrl_core.engine_kit.memory_files import write_safetensors


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {
        "a.weight": torch.arange(6, dtype=torch.float32).view(2, 3),
        "b.bias": torch.arange(5, dtype=torch.bfloat16),
        "scalar": torch.tensor(7, dtype=torch.int64),
    }


def _restored(bucket: ArrayBucket) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_numpy(data.copy()).view(getattr(torch, dtype)).view(shape)
        for name, shape, dtype, data in bucket.tensors()
    }


def test_a_safetensors_file_is_mapped_as_one_read_only_bucket(tmp_path, tensors) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    bucket = map_safetensors(str(path))
    assert not bucket.data.flags.writeable
    restored = _restored(bucket)
    assert restored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(restored[name], tensor, rtol=0, atol=0)
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x07")
    assert bucket.data[-1] == 7, "no copy: what is written to the file later is seen"


def test_an_update_yields_its_files_like_its_buckets(tmp_path, tensors) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    (bucket,) = WeightUpdate(files=(str(path),))
    (same,) = WeightUpdate(buckets=[bucket])
    assert bucket.names == same.names and np.array_equal(bucket.data, same.data)
    assert list(WeightUpdate(shared=True)) == []


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 64, b"\x02" + b"\0" * 7 + b"[]"])
def test_a_file_that_is_not_safetensors_is_refused(tmp_path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(EngineError, match="model.safetensors cannot be read as safetensors"):
        map_safetensors(str(path))


def test_a_missing_file_is_refused(tmp_path) -> None:
    with pytest.raises(EngineError, match="cannot be read"):
        map_safetensors(str(tmp_path / "none.safetensors"))


def test_a_bucket_is_written_as_it_is_mapped(tmp_path, tensors) -> None:
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    bucket = map_safetensors(str(path))
    write_safetensors(tmp_path / "again.safetensors", bucket)
    again = map_safetensors(str(tmp_path / "again.safetensors"))
    assert (again.names, again.shapes, again.dtypes) == (bucket.names, bucket.shapes, bucket.dtypes)
    assert np.array_equal(again.data, bucket.data)
    for name, tensor in load_file(tmp_path / "again.safetensors").items():
        torch.testing.assert_close(tensor, tensors[name], rtol=0, atol=0)
