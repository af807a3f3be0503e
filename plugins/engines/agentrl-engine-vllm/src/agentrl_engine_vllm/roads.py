"""The roads that new weights take to vLLM's workers."""

import asyncio
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from agentrl_core.api.engine import EngineContext
from agentrl_core.api.ports import free_port, host_address
from agentrl_core.api.weights import WeightUpdate, write_safetensors

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
    """

    def __init__(self, workers: int) -> None:
        self._size = 1 + workers
        self._group: Any = None

    async def send(self, llm: Any, update: WeightUpdate) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        if self._group is None:
            self._group = await self._join(llm)
        for bucket in update:
            layout = {"names": list(bucket.names), "shapes": [list(shape) for shape in bucket.shapes]}
            request = WeightTransferUpdateRequest(update_info={**layout, "dtypes": list(bucket.dtypes)})
            # Where a worker refuses, nobody receives, and sending would wait for its own time limit.
            await asyncio.gather(llm.update_weights(request), asyncio.to_thread(self._group.send, bucket))

    async def _join(self, llm: Any) -> Any:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        from agentrl_core.api.weight_group import WeightGroup

        address = host_address()
        address = f"{address}:{free_port(host=address)}"
        place = {"address": address, "backend": "gloo", "first_rank": 1, "size": self._size}
        group, _ = await asyncio.gather(
            asyncio.to_thread(WeightGroup, address, 0, self._size),
            llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=place)),
        )
        return group

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


def make_road(context: EngineContext) -> WeightRoad:
    """Files for workers on one host."""
    return GroupRoad(context.tensor_parallel * context.pipeline_parallel) if context.nodes > 1 else FileRoad()


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
