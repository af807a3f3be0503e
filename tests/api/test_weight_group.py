"""Weights that are broadcast to other processes."""

import multiprocessing
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_core.api import ArrayBucket, EngineError
from agentrl_core.api.ports import free_port, host_address
from agentrl_core.api.weight_group import WeightGroup

TENSORS = {
    # Of odd sizes, so that the others do not begin where their elements could.
    "flags": torch.tensor([1, 2, 3], dtype=torch.uint8),
    "matrix": torch.tensor([[1.5, -2.0], [3.25, 4.0]]),
    "scalar": torch.tensor(0.5, dtype=torch.bfloat16),
    "empty": torch.empty(0, 7),
    "counts": torch.tensor([1 << 40, -1]),
}


def bucket(tensors: dict[str, torch.Tensor]) -> ArrayBucket:
    raw = [tensor.reshape(-1).view(torch.uint8).numpy() for tensor in tensors.values()]
    data = np.concatenate(raw)
    data.flags.writeable = False
    return ArrayBucket(
        tuple(tensors),
        tuple(tuple(tensor.shape) for tensor in tensors.values()),
        tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()),
        data,
    )


def receive(address: str, rank: int, times: int, answers: Any) -> None:
    layout = bucket(TENSORS)
    with WeightGroup(address, rank, 3, timeout=60) as group:
        for _ in range(times):
            received = dict(group.receive(layout.names, layout.shapes, layout.dtypes))
            answers.put({name: (each.dtype == TENSORS[name].dtype, each.tolist()) for name, each in received.items()})


@pytest.mark.parametrize("address", ["127.0.0.1", host_address()])
def test_every_rank_gets_every_bucket(address: str) -> None:
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    place = f"{address}:{free_port(host=address)}"
    receivers = [spawn.Process(target=receive, args=(place, rank, 2, answers)) for rank in (1, 2)]
    for process in receivers:
        process.start()
    other = {name: tensor * 2 for name, tensor in TENSORS.items()}
    with WeightGroup(place, 0, 3, timeout=60) as group:
        group.send(bucket(TENSORS))
        group.send(bucket(other))
        got = [answers.get(timeout=60) for _ in range(4)]
    for process in receivers:
        process.join(30)
        assert process.exitcode == 0
    expected = [{name: (True, tensor.tolist()) for name, tensor in each.items()} for each in (TENSORS, other)]
    assert [got.count(each) for each in expected] == [2, 2]


def test_a_rank_that_does_not_come_is_not_waited_for_for_ever() -> None:
    place = f"127.0.0.1:{free_port()}"
    with pytest.raises(
        EngineError, match=f"rank 0 of the 2 .* could not join the others at {place} within 1 s.*IFNAME"
    ):
        WeightGroup(place, 0, 2, timeout=1)
