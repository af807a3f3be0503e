"""Weights that go from the actor to another process on the same device, through a buffer that both map."""

import multiprocessing
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _gpu_bench import BUCKET_BYTES, Bench, Memory
from _report import Figure
from safetensors.torch import load_file

from agentrl_core.api.weights import Broadcast
from agentrl_core.engine_kit.weight_group import join_as_engine

FACTORS = (1.0, 2.0, -0.5)
"""The weights of each update in parts of those in the model's directory: powers of 2, so that no bit is rounded."""


def ipc(bench: Bench) -> Iterator[Figure]:
    """Three updates through CUDA IPC; the receiver compares every bit with the files of the model."""
    case = f"weights by IPC on {bench.device.type}"
    context = multiprocessing.get_context("forkserver")
    with bench.actor() as actor:
        broadcast = actor.open_broadcast("127.0.0.1", "ipc", 1, BUCKET_BYTES)
        size = sum(bucket.nbytes for bucket in broadcast.buckets) / 2**30
        answers: Any = context.Queue()
        receiver = context.Process(
            target=receive, args=(broadcast, bench.device.type, bench.model_path, answers), daemon=True
        )
        receiver.start()
        try:
            scale = 1.0
            for number, factor in enumerate(FACTORS):
                with torch.no_grad():
                    for parameter in actor.module.parameters():
                        parameter.mul_(factor / scale)
                scale = factor
                start = time.perf_counter()
                _send(actor, replace(broadcast, buckets=()), receiver)
                seconds = time.perf_counter() - start
                wrong, tensors, growth = answers.get(timeout=60)
                if number:
                    # The first one waits for the other process.
                    yield Figure(case, f"update {number + 1}", size / seconds, "GiB/s")
                yield Figure(case, f"update {number + 1}: tensors that are not the model's", wrong, "", 0)
                yield Figure(case, f"update {number + 1}: tensors received", tensors, "", 1, at_least=True)
                if growth is not None:
                    goal = 3 * max(bucket.nbytes for bucket in broadcast.buckets) / 2**30
                    yield Figure(case, f"update {number + 1}: memory in the receiver", growth, "GiB", goal)
            receiver.join(60)
            yield Figure(case, "exit status of the receiver", float(receiver.exitcode or 0), "", 0)
        finally:
            receiver.kill()
            receiver.join()


def _send(actor: Any, broadcast: Broadcast, receiver: Any) -> None:
    """Raises RuntimeError where the other process has ended: the actor would wait for it for minutes."""
    failures: list[BaseException] = []

    def send() -> None:
        try:
            actor.send_weights(broadcast, BUCKET_BYTES)
        except BaseException as error:  # noqa: BLE001 - of another thread, raised below
            failures.append(error)

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    while sending.is_alive():
        sending.join(0.05)
        if receiver.exitcode and sending.is_alive():
            raise RuntimeError(f"the process that receives ended with {receiver.exitcode}, see its error above")
    if failures:
        raise failures[0]


def receive(broadcast: Broadcast, device: str, model: Path, answers: Any) -> None:
    """The engine's side: for each update the number of wrong tensors, of all, and the memory that it took."""
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    stored = load_file(model / "model.safetensors")
    memory = Memory(place)
    with join_as_engine(broadcast, broadcast.first_rank, place) as group:
        for factor in FACTORS:
            wrong = tensors = 0
            memory.settle()
            for bucket in broadcast.buckets:
                for name, tensor in group.receive(bucket):
                    expected = stored[name].to(tensor.dtype) * factor
                    wrong += tensor.device != place or not torch.equal(tensor.cpu(), expected)
                    tensors += 1
            answers.put((wrong, tensors, memory.growth))
