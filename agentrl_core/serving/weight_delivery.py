"""How engine replicas come to the actor's weights: the newest ones, and what those build on."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from agentrl_core.api import WeightUpdate
from agentrl_core.api.weights import Broadcast
from agentrl_core.controller.event_loop import in_daemon_thread
from agentrl_core.controller.runtime import ActorHandle


class WeightSender(Protocol):
    """The actor, where it sends weights from its device to those of the engines. Its methods block."""

    def open(self, size: int) -> Broadcast:
        """A new group of so many ranks, the actor's among them; ``first_rank`` is that of the first engine."""

    def send(self, broadcast: Broadcast) -> None:
        """Send the weights in that group, while all its engines receive."""

    def files(self) -> WeightUpdate:
        """The same weights, for a replica that is started between two updates."""


@dataclass(frozen=True)
class Weights:
    """What replicas get, one after the other.

    Args:
        update: for those that can read its files, or for all where it has none.
        elsewhere: for the others, in the runtime's store.
        version: of the weights.
        sender: made them, where they were broadcast: ``update`` is empty then.
    """

    update: WeightUpdate
    elsewhere: Any
    version: int
    sender: WeightSender | None = None


@dataclass
class Member:
    """One replica.

    Args:
        servers: one on each of its hosts; the first one takes requests and weights.
        restarts_left: new starts that it still has.
        newest: weights that it has taken last.
        whole: the same, or those that the adapter in ``newest`` belongs to.
        is_alive: serves, as far as is known.
    """

    servers: list[ActorHandle]
    restarts_left: int
    newest: Weights | None = None
    whole: Weights | None = None
    is_alive: bool = True

    @property
    def server(self) -> ActorHandle:
        """The one that takes requests."""
        return self.servers[0]

    @property
    def version(self) -> int | None:
        """Of its weights; None before the first update."""
        return None if self.newest is None else self.newest.version


class WeightDelivery:
    """Keeps the newest weights for replicas that come back, and hands weights over.

    Args:
        devices: of a replica.
    """

    def __init__(self, devices: int) -> None:
        self._devices = devices
        self._newest: Weights | None = None
        # The same, or what its adapter belongs to: a replica that starts anew needs both.
        self._whole: Weights | None = None
        # The servers in the group that weights were broadcast in last.
        self._group: tuple[list[ActorHandle], Broadcast] | None = None
        # Two calls at once could reach the actor's ranks in different orders, which would then wait for each other.
        self._sender_is_free = asyncio.Lock()

    def note(self, weights: Weights) -> None:
        """These are the newest ones."""
        self._newest = weights
        if weights.update.adapter is None:
            self._whole = weights

    async def load(self, member: Member) -> None:
        """Give a replica the newest weights, and before an adapter those that it belongs to.

        Raises:
            EngineError: it refuses them.
            WorkerError: it died.
        """
        while self._newest is not None and member.newest is not self._newest:
            whole = self._whole
            await self._send(member, self._newest if whole is None or member.whole is whole else whole)

    async def broadcast(self, weights: Weights, members: Sequence[Member]) -> None:
        """Let the sender of these weights send them to these replicas, all at the same time.

        Raises:
            EngineError: a replica refuses them.
            WorkerError: the actor or a replica died in the middle of it.
        """
        sender = weights.sender
        assert sender is not None
        servers = [member.server for member in members]
        async with self._sender_is_free:
            if self._group is None or list(map(id, self._group[0])) != list(map(id, servers)):
                self._group = servers, await asyncio.to_thread(sender.open, 1 + self._devices * len(members))
            broadcast = self._group[1]
            # The first error is raised at once: whoever else waits for that rank does so for a long time.
            await asyncio.gather(
                in_daemon_thread(sender.send, broadcast),
                *(self._receive(member, number, broadcast, weights) for number, member in enumerate(members)),
            )

    async def _receive(self, member: Member, number: int, broadcast: Broadcast, weights: Weights) -> None:
        broadcast = replace(broadcast, first_rank=broadcast.first_rank + number * self._devices)
        await member.server.call("update_weights", WeightUpdate(broadcast=broadcast), weights.version)
        member.newest = member.whole = weights

    async def _send(self, member: Member, weights: Weights) -> None:
        update, elsewhere = weights.update, weights.elsewhere
        if weights.sender is not None:
            async with self._sender_is_free:
                update = await asyncio.to_thread(weights.sender.files)
        if update.files and not await member.server.call("can_read", update.files):
            if elsewhere is None:
                # A replica that came back on another node; these files are at hand where the driver is.
                elsewhere = replace(update, buckets=list(update), files=())
            update = elsewhere
        await member.server.call("update_weights", update, weights.version)
        member.newest = weights
        if weights.update.adapter is None:
            member.whole = weights
