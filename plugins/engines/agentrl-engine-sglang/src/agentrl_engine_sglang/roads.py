"""The roads that new weights take to a server."""

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any, Protocol

from agentrl_core.api.engine import EngineContext
from agentrl_core.api.errors import EngineError
from agentrl_core.api.weights import ArrayBucket, WeightUpdate, write_safetensors
from agentrl_core.engine_kit.ports import free_port
from agentrl_engine_sglang.client import SGLangClient
from agentrl_engine_sglang.config import SGLangConfig

MEMORY_FOLDER = Path("/dev/shm")
SHARE_ATTEMPTS = 5


class WeightRoad(Protocol):
    """One way to send weights. Nothing may be generating meanwhile."""

    async def send(self, client: SGLangClient, update: WeightUpdate, version: int) -> None:
        """Returns when the server has the weights, their version, and an empty prefix cache."""

    def close(self) -> None:
        """Give up what is kept between updates."""


class FileRoad:
    """The server maps safetensors files that lie in memory, each of its processes what it needs.

    The files of an update are only linked to; buckets are written into files that the next update overwrites.
    """

    def __init__(self) -> None:
        place = MEMORY_FOLDER if os.access(MEMORY_FOLDER, os.W_OK) else None
        self._folder = tempfile.TemporaryDirectory(prefix="agentrl-sglang-weights-", dir=place)

    async def send(self, client: SGLangClient, update: WeightUpdate, version: int) -> None:
        await asyncio.to_thread(self._fill, update)
        await client.update_weights_from_disk(self._folder.name, version)

    def _fill(self, update: WeightUpdate) -> None:
        folder = Path(self._folder.name)
        links = {folder / f"file-{number:05d}.safetensors": path for number, path in enumerate(update.files)}
        written = {folder / f"bucket-{number:05d}.safetensors": item for number, item in enumerate(update.buckets)}
        for stale in set(folder.iterdir()) - written.keys():
            stale.unlink()
        for link, path in links.items():
            link.symlink_to(os.path.abspath(path))
        for path_, bucket in written.items():
            write_safetensors(path_, bucket)

    def close(self) -> None:
        self._folder.cleanup()


class TensorRoad:
    """The server is sent tensors in shared memory, a bucket at a time.

    Args:
        processes: of the server's model, each of which opens the bucket.
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes

    async def send(self, client: SGLangClient, update: WeightUpdate, version: int) -> None:
        await client.begin_weight_update()
        try:
            for bucket in update:
                tensor, serialized = await asyncio.to_thread(self._share, bucket)
                await client.update_weights_from_tensor([serialized] * self._processes, "flattened_bucket")
                del tensor  # the server has copied it
        finally:
            await client.end_weight_update()
        await client.flush_cache()
        await client.update_weight_version(version)

    def _share(self, bucket: ArrayBucket) -> tuple[Any, str]:
        import torch
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

        # File descriptors cannot be passed on over HTTP; names can.
        multiprocessing: Any = torch.multiprocessing
        multiprocessing.set_sharing_strategy("file_system")
        tensor: Any = torch.empty(bucket.nbytes, dtype=torch.uint8)
        move_to_shared_memory(tensor)
        tensor.numpy()[:] = bucket.data
        metadata, start = [], 0
        for name, shape, dtype, data in bucket.tensors():
            end = start + data.nbytes
            metadata.append(
                FlattenedTensorMetadata(name, torch.Size(shape), getattr(torch, dtype), start, end, data.nbytes)
            )
            start = end
        payload = {"flattened_tensor": tensor, "metadata": metadata}
        return tensor, MultiprocessingSerializer.serialize(payload, output_str=True)

    def close(self) -> None:
        return None


def move_to_shared_memory(tensor: Any) -> None:
    """Raises RuntimeError where torch cannot, after several attempts if only its manager is late."""
    for attempt in range(1, SHARE_ATTEMPTS + 1):
        try:
            tensor.share_memory_()
            return
        except RuntimeError as error:
            # It is waited for for a second, which a busy machine may not have.
            if "hared memory manager" not in str(error) or attempt == SHARE_ATTEMPTS:
                raise


class GroupRoad:
    """The server's processes receive tensors in a group of ``torch.distributed``, whose rank 0 is this process.

    They may be on other hosts. The backend is gloo, also for a model on GPUs: NCCL wants a GPU of its own for rank 0.

    Args:
        processes: of the server's model.
        address: of this host, as the server's processes see it.
    """

    _NAME = "agentrl"

    def __init__(self, processes: int, address: str) -> None:
        self._processes = processes
        self._address = address
        self._group: Any = None

    async def send(self, client: SGLangClient, update: WeightUpdate, version: int) -> None:
        if self._group is None:
            self._group = await self._join(client)
        await client.begin_weight_update()
        try:
            for bucket in update:
                # Where the server refuses, nobody receives, and the broadcast would wait for its own time limit.
                await asyncio.gather(
                    client.update_weights_from_distributed(bucket, self._NAME),
                    asyncio.to_thread(self._broadcast, bucket),
                )
        finally:
            await client.end_weight_update()
        await client.flush_cache()
        await client.update_weight_version(version)

    async def _join(self, client: SGLangClient) -> Any:
        from sglang.srt.utils import init_custom_process_group

        port, size = free_port(), 1 + self._processes
        address = f"tcp://{self._address}:{port}"
        group, _ = await asyncio.gather(
            asyncio.to_thread(
                init_custom_process_group,
                backend="gloo",
                init_method=address,
                world_size=size,
                rank=0,
                group_name=self._NAME,
            ),
            client.init_weights_update_group(self._address, port, size, self._NAME, "gloo"),
        )
        return group

    def _broadcast(self, bucket: ArrayBucket) -> None:
        import torch

        for _, shape, dtype, data in bucket.tensors():
            # A copy: torch has no read-only tensors.
            tensor = torch.from_numpy(data.copy()).view(getattr(torch, dtype)).view(shape)
            torch.distributed.broadcast(tensor, src=0, group=self._group)

    def close(self) -> None:
        if self._group is not None:
            import torch

            torch.distributed.destroy_process_group(self._group)
            self._group = None


def make_road(config: SGLangConfig, context: EngineContext) -> WeightRoad:
    """The road that ``weight_road`` names.

    Raises:
        EngineError: it does not lead to all processes of the server.
    """
    several = context.nodes > 1
    road = config.weight_road if config.weight_road != "auto" else "group" if several else "files"
    if several and road != "group":
        raise EngineError(
            f"rollout.engine.config.weight_road={road} reaches one host, and rollout.engine.nodes={context.nodes}; set "
            "it to auto or group"
        )
    if road == "files":
        return FileRoad()
    if context.pipeline_parallel * context.data_parallel > 1:
        # It knows the processes of one tensor-parallel group, of one stage and copy of the model.
        raise EngineError(
            f"rollout.engine: SGLang takes weights from a {'group' if road == 'group' else 'tensor'} with "
            f"tensor_parallel only, and pipeline_parallel={context.pipeline_parallel}, data_parallel="
            f"{context.data_parallel}; set both to 1, or "
            + ("nodes to 1 and config.weight_road to files" if road == "group" else "config.weight_road to files")
        )
    if road == "tensors":
        return TensorRoad(context.tensor_parallel)
    address, _, _ = context.rendezvous.rpartition(":")
    return GroupRoad(context.tensor_parallel, address or "127.0.0.1")
