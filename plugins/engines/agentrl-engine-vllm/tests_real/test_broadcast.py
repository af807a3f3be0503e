"""Weights that an actor sends to vLLM's workers, on whatever host they are."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from agentrl_core.api import SamplingParams, WeightUpdate
from agentrl_core.api.weights import Broadcast
from agentrl_core.engine_kit.ports import free_port, host_address
from agentrl_core.engine_kit.weight_group import WeightGroup
from tests_real.engine_suite import LONG, TOLERANCE, Case


@pytest.mark.parametrize("backend", ["gloo", "ipc"])
def test_each_update_may_take_another_transport(case: Case, run: Any, backend: str) -> None:
    workers = case.engine._context.tensor_parallel  # type: ignore[attr-defined]
    # Two ranks before the workers', as if another engine had the first one.
    size = 2 + workers
    updates = {version: case.models.buckets(version) for version in range(1, 8)}

    def sender(address: str, rank: int, versions: int, started: int) -> None:
        group = WeightGroup(address, rank, size, backend, timeout=60)
        for version in range(started, started + versions):
            for bucket in updates[version]:
                if rank == 0:
                    group.broadcast(torch.from_numpy(bucket.data.copy()))
                else:
                    list(group.receive(bucket))
        group.close()

    async def by_broadcast(address: str, version: int) -> None:
        layout = tuple(replace(bucket, data=np.empty(0, np.uint8)) for bucket in updates[version])
        broadcast = Broadcast(address, backend, size, first_rank=2, buckets=layout)
        engine = getattr(case.engine, "_engine", case.engine)
        await engine.update_weights(WeightUpdate(broadcast=broadcast), version)

    async def gap(version: int) -> float:
        output = await case.engine.generate(LONG, SamplingParams(16), "s")
        assert [span.version for span in output.spans] == [version]
        return case.gap([LONG], [output], seed=version)

    async def main() -> list[float]:
        gaps = []
        await case.engine.update_weights(updates[1], 1)
        for first in (2, 5):
            # A group for two updates, then weights from the host's memory, then a new group.
            host = host_address()
            address = f"{host}:{free_port(host=host)}"
            others = [asyncio.to_thread(sender, address, rank, 2, first) for rank in (0, 1)]
            sending = asyncio.gather(*others)
            for version in (first, first + 1):
                await by_broadcast(address, version)
                gaps.append(await gap(version))
            await sending
            await case.engine.update_weights(case.models.files(first + 2), first + 2)
            gaps.append(await gap(first + 2))
        return gaps

    assert max(run(main())) <= TOLERANCE
