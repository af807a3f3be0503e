"""Batches that travel: pickle with out-of-band buffers, and files without pickle."""

import pickle
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tensordict import TensorDict

from agentrl_core.api.errors import ProtocolError
from agentrl_core.protocol import DataProto


def travel(data: DataProto) -> DataProto:
    buffers: list[pickle.PickleBuffer] = []
    payload = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(payload, buffers=[bytes(buffer) for buffer in buffers])


def test_empty_tensordict_round_trips(tmp_path) -> None:
    for rows in (0, 3):
        data = DataProto(TensorDict({}, [rows]), {"o": list(range(rows))})
        data.save_to_disk(tmp_path / "batch")
        for again in (travel(data), pickle.loads(pickle.dumps(data)), DataProto.load_from_disk(tmp_path / "batch")):
            assert again.batch.batch_size == torch.Size([rows]) and again.non_tensor_batch["o"].tolist() == list(
                range(rows)
            )
    assert travel(DataProto(TensorDict({}, []))).batch is not None


def test_tensors_travel_out_of_band_and_are_not_copied() -> None:
    data = DataProto.from_dict({"x": torch.zeros(1000, 100), "b": torch.zeros(1000, dtype=torch.bfloat16)})
    buffers: list[pickle.PickleBuffer] = []
    payload = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    assert len(payload) < 2000 and sum(len(buffer.raw()) for buffer in buffers) == data.nbytes()
    again = pickle.loads(payload, buffers=buffers)
    assert again.batch["x"].data_ptr() == data.batch["x"].data_ptr()


def test_a_reader_of_read_only_memory_gets_a_private_copy_from_writable(recwarn: pytest.WarningsRecorder) -> None:
    data = DataProto.from_dict({"x": torch.ones(4)})
    buffers: list[pickle.PickleBuffer] = []
    payload = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    stored = [bytes(buffer) for buffer in buffers]
    first, second = (pickle.loads(payload, buffers=stored) for _ in range(2))
    first.writable().batch["x"].mul_(5)
    assert second.batch["x"].tolist() == [1, 1, 1, 1]
    assert not recwarn.list


def test_a_chunk_carries_only_its_own_rows() -> None:
    chunk = DataProto.from_dict({"x": torch.zeros(1000, 8)}).chunk(100)[3]
    assert len(pickle.dumps(chunk, protocol=5)) < 2000


def test_disk_keeps_python_values_as_they_were(tmp_path) -> None:
    rows = [
        None,
        True,
        2**70,
        0.5,
        "ü\ud800",
        [1, [2]],
        (1, (2,)),
        {"a": {"b": []}},
        {1: "x", ("t",): 2},
        {"$tuple": 1},
        {},
    ]
    rows += [np.int64(3), np.float32(0.1), np.bool_(True)]
    data = DataProto.from_dict(non_tensors={"o": rows}, meta_info={"n": float("inf"), "t": (1,)})
    data.save_to_disk(tmp_path / "batch")
    again = DataProto.load_from_disk(tmp_path / "batch")
    assert again.non_tensor_batch["o"].tolist() == rows
    assert [type(item) for item in again.non_tensor_batch["o"]] == [type(item) for item in rows]
    assert again.meta_info == {"n": float("inf"), "t": (1,)}


def test_disk_keeps_arrays_and_tensors_inside_rows(tmp_path) -> None:
    array, tensor = np.arange(6, dtype=np.int16).reshape(2, 3), torch.ones(2, dtype=torch.bfloat16)
    objects = np.array([{"role": "user"}, None], dtype=object)
    DataProto.from_dict(non_tensors={"o": [{"pixels": array, "grid": tensor}, objects]}).save_to_disk(tmp_path / "b")
    row, again = DataProto.load_from_disk(tmp_path / "b").non_tensor_batch["o"]
    assert np.array_equal(row["pixels"], array) and row["pixels"].dtype == array.dtype
    assert torch.equal(row["grid"], tensor)
    assert again.dtype == object and again.tolist() == objects.tolist()


def test_disk_refuses_an_object_that_json_cannot_hold_and_leaves_no_file(tmp_path) -> None:
    data = DataProto.from_dict(non_tensors={"tools": [{"a": 1}, {"lock": [threading.Lock()]}]})
    with pytest.raises(ProtocolError, match=r"non_tensor_batch\['tools'\]\[1\]\['lock'\]\[0\]: a _thread.lock"):
        data.save_to_disk(tmp_path / "batch")
    assert list(tmp_path.iterdir()) == []


def test_loading_executes_nothing_and_says_what_is_wrong(tmp_path) -> None:
    (tmp_path / "pickle").write_bytes(pickle.dumps({"a": 1}))
    save_file({"x": torch.ones(1)}, tmp_path / "foreign")
    for name, message in (("pickle", "not a readable batch"), ("foreign", "format None"), ("absent", "no such file")):
        with pytest.raises(ProtocolError, match=message):
            DataProto.load_from_disk(tmp_path / name)
