"""Batches in files without pickle, and batches that are filled up."""

import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tensordict import TensorDict

from agentrl_compat_verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from agentrl_core.api import ProtocolError


def test_padding_to_a_divisor_repeats_rows_from_the_start() -> None:
    batch = DataProto.from_dict({"x": torch.arange(2)}, {"uid": ["a", "b"]})
    padded, added = pad_dataproto_to_divisor(batch, 5)
    assert (padded.non_tensor_batch["uid"].tolist(), added) == (["a", "b", "a", "b", "a"], 3)
    assert unpad_dataproto(padded, added).batch["x"].tolist() == [0, 1]
    assert pad_dataproto_to_divisor(batch[:0], 3)[1] == 0
    with pytest.raises(ProtocolError):
        unpad_dataproto(batch, 3)


def test_batches_without_tensors_round_trip(tmp_path) -> None:
    for rows in (0, 3):
        DataProto(TensorDict({}, [rows]), {"o": list(range(rows))}).save_to_disk(tmp_path / "batch")
        again = DataProto.load_from_disk(tmp_path / "batch")
        assert again.batch.batch_size == torch.Size([rows])
        assert again.non_tensor_batch["o"].tolist() == list(range(rows))


def test_a_row_that_contains_itself_is_a_protocol_error() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(ProtocolError):
        DataProto(non_tensor_batch={"x": [cycle]}).save_to_disk("unused")


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
