"""How new weights reach the server: as files that it maps, or in the group that the actor sends them in."""

import asyncio
import os

from agentrl_core.api.engine import EngineContext
from agentrl_core.api.errors import EngineError
from agentrl_core.api.weights import Broadcast, WeightUpdate
from agentrl_core.engine_kit.memory_files import MemoryFolder, write_safetensors
from agentrl_engine_sglang.client import SGLangClient


class ServerWeights:
    """Sends updates to all processes of a server. Nothing may be generating meanwhile.

    Args:
        context: of the replica.

    Raises:
        EngineError: no transport reaches all processes of this replica.
    """

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        if context.nodes > 1:
            self._check_group()
        # In it are links to the files of an update, or files that buckets have been written to. The next update
        # overwrites them.
        self._folder = MemoryFolder("sglang-weights")
        self._address = ""

    def _check_group(self) -> None:
        """SGLang receives in the processes of one tensor-parallel group, of one stage and copy of the model."""
        context = self._context
        if context.pipeline_parallel * context.data_parallel > 1:
            raise EngineError(
                "rollout.engine: SGLang takes weights that are broadcast with tensor_parallel only, and "
                f"pipeline_parallel={context.pipeline_parallel}, data_parallel={context.data_parallel}; set both to 1, "
                "or nodes to 1 and weight_transfer to host_memory"
            )

    def check(self, update: WeightUpdate) -> None:
        """Raises EngineError where an update cannot reach all processes of the server."""
        if update.shared:
            raise EngineError("the sglang engine runs in its own process: it cannot share the actor's module")
        if update.broadcast is not None:
            self._check_group()
        elif self._context.nodes > 1:
            raise EngineError(
                "rollout.engine.weight_transfer: files reach one host, and rollout.engine.nodes="
                f"{self._context.nodes}; set weight_transfer to auto or broadcast"
            )

    async def send(self, client: SGLangClient, update: WeightUpdate, version: int) -> None:
        """Returns when the server has the weights, their version, and an empty prefix cache."""
        if update.broadcast is None:
            await asyncio.to_thread(self._fill, update)
            await client.update_weights_from_disk(str(self._folder.path), version)
            return
        await self._receive(client, update.broadcast)
        await client.flush_cache()
        await client.update_weight_version(version)

    def _fill(self, update: WeightUpdate) -> None:
        folder = self._folder.path
        written = {folder / f"bucket-{number:05d}.safetensors": bucket for number, bucket in enumerate(update.buckets)}
        for stale in set(folder.iterdir()) - written.keys():
            stale.unlink()
        for number, path in enumerate(update.files):
            (folder / f"file-{number:05d}.safetensors").symlink_to(os.path.abspath(path))
        for target, bucket in written.items():
            write_safetensors(target, bucket)

    async def _receive(self, client: SGLangClient, broadcast: Broadcast) -> None:
        if self._address != broadcast.address:
            if self._address:
                await client.destroy_weights_update_group()
            self._address = broadcast.address
            await client.init_weights_update_group(broadcast)
        await client.begin_weight_update()
        try:
            for bucket in broadcast.buckets:
                await client.update_weights_from_distributed(bucket)
        finally:
            await client.end_weight_update()

    def close(self) -> None:
        """Remove what is kept between updates."""
        self._folder.close()
