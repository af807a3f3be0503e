"""Weights that are sent to other processes, through a group or shared buffers."""

import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_core.api import ArrayBucket, EngineError
from agentrl_core.engine_kit import memory_files, weight_group
from agentrl_core.engine_kit.ports import free_port, host_address
from agentrl_core.engine_kit.weight_group import WeightGroup

TENSORS = {
    # Of odd sizes, so that the others do not begin where their elements could.
    "flags": torch.tensor([1, 2, 3], dtype=torch.uint8),
    "matrix": torch.tensor([[1.5, -2.0], [3.25, 4.0]]),
    "scalar": torch.tensor(0.5, dtype=torch.bfloat16),
    "empty": torch.empty(0, 7),
    "counts": torch.tensor([1 << 40, -1]),
}
LARGE = {"large": torch.arange(5000, dtype=torch.float64)}


def bucket(tensors: dict[str, torch.Tensor]) -> ArrayBucket:
    raw = [tensor.reshape(-1).view(torch.uint8).numpy() for tensor in tensors.values()]
    data = np.concatenate(raw)
    return ArrayBucket(
        tuple(tensors),
        tuple(tuple(tensor.shape) for tensor in tensors.values()),
        tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()),
        data,
    )


def receive(address: str, rank: int, size: int, backend: str, times: int, answers: Any) -> None:
    layouts = [replace(bucket(each), data=np.empty(0, np.uint8)) for each in (TENSORS, LARGE)]
    with WeightGroup(address, rank, size, backend, timeout=60) as group:
        for number in range(times):
            received = dict(group.receive(layouts[number % 2]))
            answers.put({name: (str(each.dtype), each.tolist()) for name, each in received.items()})


@pytest.mark.parametrize(
    ("address", "backend", "actors"),
    [("127.0.0.1", "gloo", 1), (host_address(), "gloo", 1), ("127.0.0.1", "ipc", 1), ("127.0.0.1", "ipc", 2)],
)
def test_every_engine_gets_every_bucket(warm_processes: Any, address: str, backend: str, actors: int) -> None:
    answers = warm_processes.Queue()
    place, size = f"{address}:{free_port(host=address)}", actors + 2
    sent = [TENSORS, LARGE, {name: tensor * 2 for name, tensor in TENSORS.items()}, LARGE]
    receivers = [
        warm_processes.Process(target=receive, args=(place, rank, size, backend, len(sent), answers))
        for rank in range(actors, size)
    ]
    for process in receivers:
        process.start()

    def send(rank: int) -> None:
        with WeightGroup(place, rank, size, backend, timeout=60) as group:
            for tensors in sent:
                # Of two actors on one device the second one's weights are not taken.
                group.broadcast(torch.from_numpy(bucket(tensors).data + np.uint8(rank)))

    with ThreadPoolExecutor(actors) as threads:
        list(threads.map(send, range(actors)))
    got = [answers.get(timeout=60) for _ in range(2 * len(sent))]
    for process in receivers:
        process.join(30)
        assert process.exitcode == 0
    expected = [{name: (str(each.dtype), each.tolist()) for name, each in tensors.items()} for tensors in sent]
    assert [got.count(each) for each in expected] == [2, 4, 2, 4]


def send_and_die(address: str, memory: Path) -> None:
    memory_files.MEMORY = memory
    group = WeightGroup(address, 0, 2, "ipc", timeout=60)
    group.broadcast(torch.from_numpy(bucket(LARGE).data))
    assert list(memory.iterdir())
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_actor_leaves_nothing_in_memory_while_engines_live(warm_processes: Any, tmp_path: Path) -> None:
    place = f"127.0.0.1:{free_port()}"
    actor = warm_processes.Process(target=send_and_die, args=(place, tmp_path))
    actor.start()
    with WeightGroup(place, 1, 2, "ipc", timeout=60) as group:
        ((_, received),) = group.receive(bucket(LARGE))
        actor.join(60)
        assert actor.exitcode == -signal.SIGKILL
        deadline = time.monotonic() + 30
        # Another process removes it; there is nothing to wait on but the directory.
        while list(tmp_path.iterdir()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert torch.equal(received, LARGE["large"])


def test_a_handle_that_is_too_long_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_group, "_HANDLE_BYTES", 20)
    with (
        WeightGroup(f"127.0.0.1:{free_port()}", 0, 1, "ipc") as group,
        pytest.raises(EngineError, match="handle of a buffer on cpu has .* at most 20 can be sent.*TMPDIR"),
    ):
        group.broadcast(torch.zeros(1, dtype=torch.uint8))


def test_an_engine_on_a_device_without_an_actor_says_so() -> None:
    place = f"127.0.0.1:{free_port()}"

    def join(rank: int) -> None:
        with WeightGroup(place, rank, 2, "ipc", timeout=10) as group:
            list(group.receive(bucket(LARGE)))

    with ThreadPoolExecutor(2) as threads:
        joining = [threads.submit(join, rank) for rank in range(2)]
        for each in joining:
            with pytest.raises(EngineError, match="no process of the actor computes on"):
                each.result()


def test_a_rank_that_does_not_come_is_not_waited_for_for_ever() -> None:
    place = f"127.0.0.1:{free_port()}"
    with pytest.raises(
        EngineError, match=f"rank 0 of the 2 .* could not join the others at {place} within 1 s.*IFNAME"
    ):
        WeightGroup(place, 0, 2, timeout=1)


def test_gloo_uses_the_interface_that_the_user_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    WeightGroup(f"127.0.0.1:{free_port()}", 0, 1).close()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing0")
    with pytest.raises(EngineError, match="nothing0"):
        WeightGroup(f"127.0.0.1:{free_port()}", 0, 1)


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
