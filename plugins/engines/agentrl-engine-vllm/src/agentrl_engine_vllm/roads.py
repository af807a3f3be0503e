"""The roads that new weights take to vLLM's workers."""

import asyncio
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from agentrl_core.api.engine import EngineContext
from agentrl_core.api.weights import ArrayBucket, WeightUpdate, write_safetensors
from agentrl_core.engine_kit.ports import free_port, host_address

MEMORY_FOLDER = Path("/dev/shm")


class WeightRoad(Protocol):
    """One way to send weights, between ``start_weight_update`` and ``finish_weight_update``."""

    async def send(self, llm: Any, update: WeightUpdate) -> None:
        """Returns when all workers have loaded them."""

    def close(self) -> None:
        """Give up what is kept between updates."""


class FileRoad:
    """Workers map safetensors files, held in memory where the host can."""

    async def send(self, llm: Any, update: WeightUpdate) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        with weight_files(update) as paths:
            while path := await asyncio.to_thread(next, paths, None):
                await llm.update_weights(WeightTransferUpdateRequest(update_info={"files": [path]}))

    def close(self) -> None:
        return None


class GroupRoad:
    """Workers, on whatever host they are, receive buckets in a group whose rank 0 is this process.

    The backend is gloo, also for a model on GPUs: NCCL wants a GPU of its own for rank 0.

    Args:
        workers: of the engine, on all its hosts.
        membership: of these workers.
    """

    def __init__(self, workers: int, membership: "Membership") -> None:
        self._size = 1 + workers
        self._membership = membership
        self._address = ""
        self._group: Any = None

    async def send(self, llm: Any, update: WeightUpdate) -> None:
        if self._group is None or self._membership.address != self._address:
            self.close()
            await self._join(llm)
        for bucket in update:
            # Where a worker refuses, nobody receives, and sending would wait for its own time limit.
            await asyncio.gather(_receive(llm, bucket), asyncio.to_thread(self._group.send, bucket))

    async def _join(self, llm: Any) -> None:
        from agentrl_core.engine_kit.weight_group import WeightGroup

        host = host_address()
        self._address = f"{host}:{free_port(host=host)}"
        self._group, _ = await asyncio.gather(
            asyncio.to_thread(WeightGroup, self._address, 0, self._size),
            self._membership.join(llm, self._address, "gloo", 1, self._size),
        )

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


class BroadcastRoad:
    """Workers receive what the actor sends, in a group that they share with it."""

    def __init__(self, membership: "Membership") -> None:
        self._membership = membership

    async def send(self, llm: Any, update: WeightUpdate) -> None:
        broadcast = update.broadcast
        assert broadcast is not None
        await self._membership.join(llm, broadcast.address, broadcast.backend, broadcast.first_rank, broadcast.size)
        for bucket in broadcast.buckets:
            await _receive(llm, bucket)

    def close(self) -> None:
        return None


class Membership:
    """The group that an engine's workers are in: one at a time."""

    def __init__(self) -> None:
        self.address = ""

    async def join(self, llm: Any, address: str, backend: str, first_rank: int, size: int) -> None:
        """Returns at once where it is the same group as before."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        if self.address != address:
            self.address = address
            place = {"address": address, "backend": backend, "first_rank": first_rank, "size": size}
            await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=place))


async def _receive(llm: Any, bucket: ArrayBucket) -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    layout = {"names": list(bucket.names), "shapes": list(map(list, bucket.shapes)), "dtypes": list(bucket.dtypes)}
    await llm.update_weights(WeightTransferUpdateRequest(update_info=layout))


def make_roads(context: EngineContext) -> tuple[WeightRoad, WeightRoad]:
    """For weights that lie in the host's memory, where workers on one host map files, and for those that are sent."""
    membership = Membership()
    workers = context.tensor_parallel * context.pipeline_parallel
    return GroupRoad(workers, membership) if context.nodes > 1 else FileRoad(), BroadcastRoad(membership)


@contextmanager
def weight_files(update: WeightUpdate) -> Iterator[Iterator[str]]:
    """Paths of safetensors files with all tensors of an update: its own, and one for each of its buckets.

    A bucket's file is written when it is asked for. They are gone when the context ends.
    """
    with memory_folder() as folder:
        yield _paths(update, folder)


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder of its own, in memory where the host has such a place, that is gone when the context ends."""
    place = MEMORY_FOLDER if os.access(MEMORY_FOLDER, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="agentrl-vllm-weights-", dir=place) as folder:
        yield Path(folder)


def _paths(update: WeightUpdate, folder: Path) -> Iterator[str]:
    yield from map(os.path.abspath, update.files)
    for number, bucket in enumerate(update.buckets):
        path = folder / f"bucket-{number:05d}.safetensors"
        write_safetensors(path, bucket)
        yield str(path)
        # Whoever has mapped it keeps it.
        path.unlink()
