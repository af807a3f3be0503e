"""How new weights reach vLLM's workers: as files that they map, or in the group that the actor sends them in."""

import asyncio
import os
from contextlib import closing
from typing import Any

from agentrl_core.api.errors import EngineError
from agentrl_core.api.weights import Broadcast, WeightUpdate
from agentrl_core.engine_kit.memory_files import MemoryFolder, write_safetensors


class WorkerWeights:
    """Sends updates to all workers of an engine, between ``start_weight_update`` and ``finish_weight_update``.

    Args:
        nodes: hosts that the workers are on.
    """

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        # Of the group that the workers are in: one at a time.
        self._address = ""

    def check(self, update: WeightUpdate) -> None:
        """Raises EngineError where an update cannot reach all workers."""
        if self._nodes > 1 and update.broadcast is None:
            raise EngineError(
                f"rollout.engine.weight_transfer: files reach one host, and rollout.engine.nodes={self._nodes}; set "
                "weight_transfer to auto or broadcast"
            )

    async def send(self, llm: Any, update: WeightUpdate) -> None:
        """Returns when all workers have loaded them."""
        if update.broadcast is not None:
            await self._receive(llm, update.broadcast)
        for path in update.files:
            await _tell_workers(llm, {"files": [os.path.abspath(path)]})
        if update.buckets:
            with closing(MemoryFolder("vllm-weights")) as folder:
                path = str(folder.path / "bucket.safetensors")
                for bucket in update.buckets:
                    await asyncio.to_thread(write_safetensors, path, bucket)
                    await _tell_workers(llm, {"files": [path]})
                    # A worker that has mapped the file keeps it.
                    os.unlink(path)

    async def _receive(self, llm: Any, broadcast: Broadcast) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        if self._address != broadcast.address:
            self._address = broadcast.address
            fields = {name: getattr(broadcast, name) for name in ("address", "backend", "first_rank", "size")}
            await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=fields))
        for bucket in broadcast.buckets:
            shapes = [list(shape) for shape in bucket.shapes]
            await _tell_workers(llm, {"names": list(bucket.names), "shapes": shapes, "dtypes": list(bucket.dtypes)})


async def _tell_workers(llm: Any, what: dict[str, Any]) -> None:
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    await llm.update_weights(WeightTransferUpdateRequest(update_info=what))
