"""How new weights get from the actor to the engines. This file decides it, and hands them over.

There are three transports; :func:`choose_transport` picks one for a run, from the engine's capabilities and
``rollout.engine.weight_transfer``:

- **shared module**: an engine with the capability ``shared_module`` in the trainer's process generates with the actor's
  own module. Nothing moves; only its caches are reset.
- **host memory**: the actor overwrites one safetensors file in its host's memory (``workers/weights.py``,
  ``engine_kit/memory_files.py``), and engines map it. An engine that cannot read the file, because it is on another
  host, gets the same tensors as buckets, from the object store of the host of the actor's rank 0; engines in the
  trainer's process get them as they are.
  A LoRA adapter always goes this way.
- **broadcast**: the actor sends buckets from its devices to those of the engines (``engine_kit/weight_group.py``), for
  engines with the capability ``broadcast``: NCCL to their own GPUs, gloo on the CPU, and CUDA IPC to the training
  processes' GPUs, for engines that also have the capability ``ipc``.

A replica that comes back between two updates gets the current weights by the same transport. Each engine receives a
:class:`agentrl_core.api.WeightUpdate` in one call of ``update_weights``.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from agentrl_core.api import ConfigError, WeightUpdate
from agentrl_core.api.weights import Broadcast
from agentrl_core.config.schema import OnNewWeights, ResolvedConfig
from agentrl_core.controller.runtime import ActorHandle
from agentrl_core.plugins.boundary import in_daemon_thread
from agentrl_core.serving.server import Progress
from agentrl_core.workers.protocols import Actor

InTime = Callable[[str, Coroutine[Any, Any, Any]], Coroutine[Any, Any, Any]]
BUCKET_BYTES = 256 << 20
Transport = Literal["shared_module", "buckets", "host_memory", "broadcast"]


def choose_transport(config: ResolvedConfig, shares_module: bool, on_gpus: bool = False, hosts: int = 1) -> Transport:
    """The transport of a run; ``buckets`` is host memory within one process.

    Args:
        shares_module: the engine has been given the actor's module.
        on_gpus: actor and engines compute on GPUs.
        hosts: that replicas may be on.

    Raises:
        ConfigError: the engine cannot take weights on the training processes' GPUs, and is to.
    """
    engine = config.rollout.engine
    if shares_module:
        return "shared_module"
    if config.cluster.runtime == "local":
        return "buckets"
    if config.serves_adapters:
        return "host_memory"
    lacks_ipc = broadcast_backend(config, on_gpus) == "ipc" and not engine.has("ipc")
    if engine.weight_transfer == "auto":
        # Processes on several hosts cannot map one host's file.
        is_far = engine.nodes > 1 or hosts > 1
        return "broadcast" if is_far and engine.has("broadcast") and not lacks_ipc else "host_memory"
    if engine.weight_transfer == "broadcast" and lacks_ipc:
        raise ConfigError(
            f"rollout.engine.weight_transfer: found broadcast, but the engine '{engine.name}' computes on the GPUs of "
            "the training processes and cannot take weights there (capability 'ipc'); set weight_transfer=auto, or "
            "placement=standalone"
        )
    return engine.weight_transfer


def may_share_nccl(config: ResolvedConfig) -> bool:
    """Whether actor and engines may be in one NCCL group. Known before the nodes are."""
    engine = config.rollout.engine
    several = engine.nodes > 1 or config.cluster.address is not None
    return engine.placement == "standalone" and (
        engine.weight_transfer == "broadcast" or (engine.weight_transfer == "auto" and several)
    )


def broadcast_backend(config: ResolvedConfig, on_gpus: bool) -> str:
    """``gloo``, ``nccl`` or ``ipc``, see :class:`agentrl_core.api.weights.Broadcast`."""
    if not on_gpus:
        return "gloo"
    # NCCL needs a GPU for each rank.
    return "nccl" if config.rollout.engine.placement == "standalone" else "ipc"


@dataclass
class Weights:
    """What replicas get, one after the other.

    Args:
        version: of the weights.
        updates: for replicas that can read their files, or for all where they have none; several adapters are several.
        write: makes ``updates``, over the files of those before; called once, in a thread.
        elsewhere: makes the updates for the other replicas, or what stands for them; called once, in a thread.
        sender: sends them instead, to all replicas at the same time; ``updates`` is empty then.
    """

    version: int
    updates: Sequence[WeightUpdate] = (WeightUpdate(),)
    write: Callable[[], Sequence[WeightUpdate]] | None = None
    elsewhere: Callable[[], Sequence[Any]] | None = None
    sender: "ActorWeights | None" = None


class ActorWeights:
    """The weights of the policies, by the transport of the run.

    Args:
        transport: of the run; several policies are adapters, which are neither shared nor broadcast.
        actors: whose weights they are.
        config: of the run.
        on_gpus: actors and engines compute on GPUs.
        others: give the adapters of policies that are not trained, for a version.
    """

    def __init__(
        self,
        transport: Transport,
        actors: Sequence[Actor],
        config: ResolvedConfig,
        on_gpus: bool = False,
        others: Sequence[Callable[[int], WeightUpdate]] = (),
    ) -> None:
        self._transport = transport
        self._actors = actors
        self._actor = actors[0]
        self._others = others
        self._untrained: list[WeightUpdate] = []
        self._backend = broadcast_backend(config, on_gpus)
        # On a single machine the run opens no port that other machines can reach.
        self._host = "127.0.0.1" if config.cluster.address is None else ""

    def newest(self, version: int) -> Weights:
        """The present weights, as this version."""
        match self._transport:
            case "shared_module":
                return Weights(version, [WeightUpdate(shared=True, adapter=self._actor.adapter())])
            case "broadcast":
                return Weights(version, sender=self)
            case "buckets":
                return Weights(version, write=partial(self._made, _buckets, version))
            case "host_memory":
                return Weights(version, write=partial(self._made, _files, version), elsewhere=self._elsewhere)

    def _made(self, of: Callable[[Actor], WeightUpdate], version: int) -> Sequence[WeightUpdate]:
        self._untrained = [make(version) for make in self._others]
        return [*map(of, self._actors), *self._untrained]

    def _elsewhere(self) -> Sequence[Any]:
        return [*(actor.keep("weight_update", BUCKET_BYTES) for actor in self._actors), *self._untrained]

    def open(self, receivers: int) -> Broadcast:
        """A new group of the actor and so many processes of engines."""
        return self._actor.open_broadcast(self._host, self._backend, receivers, BUCKET_BYTES)

    def send(self, broadcast: Broadcast) -> None:
        """Send the weights in that group, while all its engines receive. Blocks."""
        self._actor.send_weights(replace(broadcast, buckets=()), BUCKET_BYTES)


def _buckets(actor: Actor) -> WeightUpdate:
    return WeightUpdate(buckets=actor.weight_buckets(BUCKET_BYTES), adapter=actor.adapter())


def _files(actor: Actor) -> WeightUpdate:
    return WeightUpdate(files=actor.weight_files(), adapter=actor.adapter())


@dataclass
class ReplicaState:
    """One replica.

    Args:
        servers: one on each of its hosts; the first one takes requests and weights.
        restarts_left: new starts that it still has.
        newest: weights that it has taken last.
        is_alive: serves, as far as is known.
        leaves: takes no new requests, and is closed when it has answered those that it has.
        sleeping: tags of the memory that it has released.
        looked: what its progress was when it last changed, and when that was; None before the first look.
    """

    servers: list[ActorHandle]
    restarts_left: int
    newest: Weights | None = None
    is_alive: bool = True
    leaves: bool = False
    sleeping: tuple[str, ...] = ()
    looked: tuple[Progress, float] | None = None

    @property
    def server(self) -> ActorHandle:
        """The one that takes requests."""
        return self.servers[0]

    @property
    def version(self) -> int | None:
        """Of its weights; None before the first update."""
        return None if self.newest is None else self.newest.version


class Shared:
    """Used by many at the same time, or held by one, who waits for them."""

    def __init__(self, held: bool = False) -> None:
        self._held, self._users = held, 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def used(self) -> AsyncIterator[None]:
        """Not held inside the block."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._held)
            self._users += 1
        try:
            yield
        finally:
            async with self._changed:
                self._users -= 1
                self._changed.notify_all()

    async def hold(self) -> None:
        """Nobody uses it until :meth:`release`."""
        async with self._changed:
            self._held = True
            await self._changed.wait_for(lambda: not self._users)

    async def release(self) -> None:
        """Take back :meth:`hold`."""
        async with self._changed:
            self._held = False
            self._changed.notify_all()


class WeightDelivery:
    """Keeps the newest weights for replicas that come back, and hands weights over.

    Args:
        devices: of a replica.
        on_new_weights: what becomes of requests that run, see ``rollout.on_new_weights``.
        in_time: bounds a call; WorkerError where a process is frozen. What it names comes first.
    """

    def __init__(self, devices: int, on_new_weights: OnNewWeights, in_time: InTime) -> None:
        self._devices = devices
        self._on_new_weights = on_new_weights
        self._in_time = in_time
        self.actor = Shared(held=True)
        """Held while the trainer computes: until then it has other weights, and no time."""
        self._files = Shared()
        self._newest: Weights | None = None
        self._elsewhere: tuple[Weights, Sequence[Any]] | None = None
        # The servers in the group that weights were broadcast in last.
        self._group: tuple[list[ActorHandle], Broadcast] | None = None
        # Two calls at once could reach the actor's ranks in different orders, which would then wait for each other.
        self._actor_is_free = asyncio.Lock()

    async def note(self, weights: Weights) -> None:
        """These are the newest ones. Writes them while no replica reads the ones before."""
        await self._files.hold()
        try:
            if weights.write is not None:
                async with self._actor_is_free:
                    weights.updates, weights.write = await in_daemon_thread(weights.write), None
            self._newest, self._elsewhere = weights, None
        finally:
            await self._files.release()

    def is_newest(self, member: ReplicaState) -> bool:
        """A replica has the newest weights, if there are any."""
        return self._newest is None or member.newest is self._newest

    async def load(self, member: ReplicaState) -> None:
        """Give a replica the newest weights. Those that are not in files that it can read wait for the actor.

        Raises:
            EngineError: it refuses them.
            WorkerError: it died, or does not answer.
        """
        while not self.is_newest(member):
            async with self._files.used():
                if await self._in_time("load weights", self._load_files(member)):
                    continue
            async with self.actor.used():
                if not self.is_newest(member):
                    await self._in_time("load weights", self._load_from_actor(member))

    async def _load_files(self, member: ReplicaState) -> bool:
        """Whether it can read them."""
        weights = self._newest
        assert weights is not None
        files = [file for update in weights.updates for file in update.files]
        if not files or (weights.elsewhere is not None and not await member.server.call("can_read", files)):
            return False
        await self._give(member, weights.updates, weights)
        return True

    async def _load_from_actor(self, member: ReplicaState) -> None:
        weights = self._newest
        assert weights is not None
        if weights.sender is not None:
            await self.broadcast(weights, [member])
        else:
            await self._give(member, await self._unread(weights), weights)

    async def _unread(self, weights: Weights) -> Sequence[Any]:
        if weights.elsewhere is None:
            return weights.updates
        async with self._actor_is_free:
            if self._elsewhere is None or self._elsewhere[0] is not weights:
                self._elsewhere = weights, await asyncio.to_thread(weights.elsewhere)
            return self._elsewhere[1]

    async def _give(self, member: ReplicaState, updates: Sequence[Any], weights: Weights) -> None:
        for update in updates:
            # Requests that run are ended once, when all adapters are there.
            on_running = self._on_new_weights if update is updates[-1] else "finish"
            await member.server.call("update_weights", update, weights.version, on_running)
        member.newest = weights

    async def broadcast(self, weights: Weights, members: Sequence[ReplicaState]) -> None:
        """Let the sender of these weights send them to these replicas, all at the same time.

        Raises:
            EngineError: a replica refuses them.
            WorkerError: the actor or a replica died in the middle of it.
        """
        sender = weights.sender
        assert sender is not None
        servers = [member.server for member in members]
        async with self._actor_is_free:
            if self._group is None or list(map(id, self._group[0])) != list(map(id, servers)):
                self._group = servers, await asyncio.to_thread(sender.open, self._devices * len(members))
            broadcast = self._group[1]
            # The first error is raised immediately: whoever waits for that rank does so for a long time.
            await asyncio.gather(
                in_daemon_thread(sender.send, broadcast),
                *(self._receive(member, number, broadcast, weights) for number, member in enumerate(members)),
            )

    async def _receive(self, member: ReplicaState, number: int, broadcast: Broadcast, weights: Weights) -> None:
        broadcast = replace(broadcast, first_rank=broadcast.first_rank + number * self._devices)
        await self._give(member, [WeightUpdate(broadcast=broadcast)], weights)
