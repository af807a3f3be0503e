"""Weights that are written, read and sent while replicas come back."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from agentrl_core.api import WeightUpdate
from agentrl_core.serving.weight_transport import ReplicaState, WeightDelivery, Weights


class Server:
    """Takes weights when it is told to, and writes down what it took."""

    name = "engine-0"

    def __init__(self, reads_files: bool = True) -> None:
        self.reads_files = reads_files
        self.taken: list[tuple[Any, int, str]] = []
        self.may_take = asyncio.Event()
        self.may_take.set()

    async def call(self, method: str, *args: Any) -> Any:
        if method == "can_read":
            return self.reads_files
        await self.may_take.wait()
        self.taken.append(args)


async def unbounded(what: str, call: Coroutine[Any, Any, Any]) -> Any:
    return await call


def delivery(mode: Any = "recompute") -> WeightDelivery:
    return WeightDelivery(1, mode, unbounded)


def written(version: int, write: Callable[[], object] = lambda: None, **others: Any) -> Weights:
    """Weights in a file."""

    def update() -> list[WeightUpdate]:
        write()
        return [WeightUpdate(files=(f"v{version}",))]

    return Weights(version, write=update, **others)


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_files_are_overwritten_only_while_no_replica_reads_them() -> None:
    async def main() -> None:
        weights, server = delivery(), Server()
        member = ReplicaState([server], 0)
        await weights.note(written(1))
        server.may_take.clear()
        loading = asyncio.create_task(weights.load(member))
        await turns()
        begun, go_on = threading.Event(), threading.Event()
        noting = asyncio.create_task(weights.note(written(2, lambda: (begun.set(), go_on.wait(60)))))
        await turns()
        assert not begun.is_set(), "a replica reads the files"
        server.may_take.set()
        while not begun.is_set():
            await asyncio.sleep(0.001)
        others = Server()
        late = asyncio.create_task(weights.load(ReplicaState([others], 0)))
        await turns()
        assert not others.taken, "they are being written"
        go_on.set()
        await asyncio.gather(loading, noting, late)
        assert [version for _, version, _ in server.taken] in ([1], [1, 2])
        assert [(update.files, version) for update, version, _ in others.taken] == [(("v2",), 2)]

    asyncio.run(main())


@pytest.mark.parametrize("near", [True, False])
def test_only_weights_that_lie_in_files_are_loaded_while_the_actor_trains(near: bool) -> None:
    async def main() -> None:
        weights, server, asked = delivery("continue"), Server(near), []
        member = ReplicaState([server], 0)

        def elsewhere(version: int) -> str:
            asked.append(version)
            return f"object of {version}"

        await weights.note(written(1, elsewhere=lambda: elsewhere(1)))
        loading = asyncio.create_task(weights.load(member))
        await turns()
        if near:
            assert [(version, mode) for _, version, mode in server.taken] == [(1, "continue")]
        else:
            assert not server.taken and not asked
        # Weights that are not the newest any more are never asked for: the actor has them no longer.
        await weights.note(written(2, elsewhere=lambda: [elsewhere(2)]))
        await weights.actor.release()
        await loading
        await weights.load(member)
        await weights.actor.hold()
        assert weights.is_newest(member)
        if not near:
            assert (asked, server.taken) == ([2], [("object of 2", 2, "continue")])

    asyncio.run(main())


def test_whoever_trains_waits_for_replicas_that_use_the_actor() -> None:
    async def main() -> None:
        weights, server = delivery(), Server()
        await weights.note(Weights(1))
        await weights.actor.release()
        server.may_take.clear()
        loading = asyncio.create_task(weights.load(ReplicaState([server], 0)))
        await turns()
        holding = asyncio.create_task(weights.actor.hold())
        await turns()
        assert not holding.done()
        server.may_take.set()
        await asyncio.gather(loading, holding)

    asyncio.run(main())
