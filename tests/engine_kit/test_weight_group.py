"""Weights that are sent to other processes, through a group or a shared buffer."""

import multiprocessing
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_core.api import ArrayBucket, EngineError
from agentrl_core.engine_kit.ports import free_port, host_address
from agentrl_core.engine_kit.weight_group import WeightBuffer, WeightGroup

TENSORS = {
    # Of odd sizes, so that the others do not begin where their elements could.
    "flags": torch.tensor([1, 2, 3], dtype=torch.uint8),
    "matrix": torch.tensor([[1.5, -2.0], [3.25, 4.0]]),
    "scalar": torch.tensor(0.5, dtype=torch.bfloat16),
    "empty": torch.empty(0, 7),
    "counts": torch.tensor([1 << 40, -1]),
}
LARGE = {"large": torch.arange(5000, dtype=torch.float64)}
CPU = torch.device("cpu")


def bucket(tensors: dict[str, torch.Tensor]) -> ArrayBucket:
    raw = [tensor.reshape(-1).view(torch.uint8).numpy() for tensor in tensors.values()]
    data = np.concatenate(raw)
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
        group.broadcast(torch.from_numpy(bucket(TENSORS).data))
        group.broadcast(torch.from_numpy(bucket(other).data))
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


def take(address: str, times: int, answers: Any) -> None:
    layouts = [bucket(TENSORS), bucket(LARGE)]
    buffer = WeightBuffer(address, 3, CPU, timeout=60)
    for number in range(times):
        layout = layouts[number % 2]
        received = dict(buffer.receive(layout.names, layout.shapes, layout.dtypes))
        answers.put({name: each.tolist() for name, each in received.items()})
    buffer.close()


def test_everybody_on_a_device_takes_what_its_buffer_holds() -> None:
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    address = f"127.0.0.1:{free_port()}"
    readers = [spawn.Process(target=take, args=(address, 4, answers)) for _ in range(2)]
    for process in readers:
        process.start()
    sent = [TENSORS, LARGE, {name: tensor + 1 for name, tensor in TENSORS.items()}, LARGE]

    def hand_over(opens_store: bool, doubt: int) -> None:
        buffer = WeightBuffer(address, 3, CPU, is_actor=True, opens_store=opens_store, timeout=60)
        for tensors in sent:
            buffer.broadcast(torch.from_numpy(bucket(tensors).data + np.uint8(doubt)))
        buffer.close()

    # Of two actors on one device the second one only looks on.
    first = threading.Thread(target=hand_over, args=(True, 0))
    first.start()
    time.sleep(1.0)
    hand_over(False, 1)
    first.join(60)
    got = [answers.get(timeout=60) for _ in range(8)]
    for process in readers:
        process.join(30)
        assert process.exitcode == 0
    expected = [{name: tensor.tolist() for name, tensor in each.items()} for each in sent]
    assert [got.count(each) for each in expected] == [2, 4, 2, 4]


def test_a_buffer_without_readers_is_not_waited_for_for_ever() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(EngineError, match=f"store at {address}.*'engine 1' has not come within 1 s"):
        WeightBuffer(address, 2, CPU, is_actor=True, opens_store=True, timeout=1)


def test_a_store_on_one_machine_cannot_be_reached_from_others() -> None:
    """It has no authentication: a stranger could write its keys."""
    port = free_port()
    failed = pytest.raises(EngineError)
    with failed, ThreadPoolExecutor(1) as threads:
        joining = threads.submit(WeightGroup, f"127.0.0.1:{port}", 0, 2, timeout=3)
        reached = {host: _is_open(host, port) for host in ("127.0.0.1", host_address())}
        assert reached == {"127.0.0.1": True, host_address(): False}
        joining.result()


def _is_open(host: str, port: int) -> bool:
    for _ in range(20):
        with socket.socket() as probe:
            probe.settimeout(0.1)
            if probe.connect_ex((host, port)) == 0:
                return True
            threading.Event().wait(0.02)
    return False
