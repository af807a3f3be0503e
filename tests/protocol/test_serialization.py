"""Batches that travel: pickle with out-of-band buffers."""

import pickle

import pytest
import torch
from tensordict import TensorDict

from agentrl_core.protocol import DataProto


def travel(data: DataProto) -> DataProto:
    buffers: list[pickle.PickleBuffer] = []
    payload = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(payload, buffers=[bytes(buffer) for buffer in buffers])


def test_empty_tensordict_round_trips() -> None:
    for rows in (0, 3):
        data = DataProto(TensorDict({}, [rows]), {"o": list(range(rows))})
        for again in (travel(data), pickle.loads(pickle.dumps(data))):
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
