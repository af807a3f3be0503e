"""How new weights get from the actor to the engines. This file decides it, and hands them over.

There are three transports; :func:`choose_transport` picks one for a run, from the engine's capabilities and
``rollout.engine.weight_transfer``:

- **shared module**: an engine with the capability ``shared_module`` in the trainer's process generates with the actor's
  own module. Nothing moves; only its caches are reset.
- **host memory**: the actor overwrites one safetensors file in its host's memory (``workers/weights.py``,
  ``engine_kit/memory_files.py``), and engines map it. An engine that cannot read the file, because it is on another
  host, gets the same tensors as buckets, from the object store of the host of the actor's rank 0; engines in the
  trainer's process get them as they are.
- **broadcast**: the actor sends buckets from its devices to those of the engines (``engine_kit/weight_group.py``), for
  engines with the capability ``broadcast``: NCCL to their own GPUs, gloo on the CPU, and CUDA IPC to the training
  processes' GPUs, for engines that also have the capability ``ipc``.

A replica that comes back between two updates gets the current weights by the same transport. Each engine receives a
:class:`agentrl_core.api.WeightUpdate` in one call of ``update_weights``.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from agentrl_core.api import ConfigError, WeightUpdate
from agentrl_core.api.weights import Broadcast
from agentrl_core.config.schema import ResolvedConfig
from agentrl_core.controller.runtime import ActorHandle
from agentrl_core.plugins.boundary import in_daemon_thread
from agentrl_core.serving.server import Progress
from agentrl_core.workers.protocols import Actor

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
        update: for replicas that can read its files, or for all where it has none.
        elsewhere: makes the update for the other replicas, or what stands for it; called once, in a thread.
        sender: sends them instead, to all replicas at the same time; ``update`` is empty then.
    """

    version: int
    update: WeightUpdate = field(default_factory=WeightUpdate)
    elsewhere: Callable[[], Any] | None = None
    sender: "ActorWeights | None" = None


class ActorWeights:
    """The actor's weights, by the transport of the run.

    Args:
        transport: of the run.
        actor: whose weights they are.
        config: of the run.
        on_gpus: actor and engines compute on GPUs.
    """

    def __init__(self, transport: Transport, actor: Actor, config: ResolvedConfig, on_gpus: bool = False) -> None:
        self._transport = transport
        self._actor = actor
        self._backend = broadcast_backend(config, on_gpus)
        # On a single machine the run opens no port that other machines can reach.
        self._host = "127.0.0.1" if config.cluster.address is None else ""

    def newest(self, version: int) -> Weights:
        """The present weights, as this version."""
        match self._transport:
            case "shared_module":
                return Weights(version, WeightUpdate(shared=True))
            case "broadcast":
                return Weights(version, sender=self)
            case "buckets":
                return Weights(version, WeightUpdate(buckets=self._actor.weight_buckets(BUCKET_BYTES)))
            case "host_memory":
                return Weights(version, WeightUpdate(files=self._actor.weight_files()), self._elsewhere)

    def _elsewhere(self) -> Any:
        return self._actor.keep("weight_update", BUCKET_BYTES)

    def open(self, receivers: int) -> Broadcast:
        """A new group of the actor and so many processes of engines."""
        return self._actor.open_broadcast(self._host, self._backend, receivers, BUCKET_BYTES)

    def send(self, broadcast: Broadcast) -> None:
        """Send the weights in that group, while all its engines receive. Blocks."""
        self._actor.send_weights(replace(broadcast, buckets=()), BUCKET_BYTES)


@dataclass
class ReplicaState:
    """One replica.

    Args:
        servers: one on each of its hosts; the first one takes requests and weights.
        restarts_left: new starts that it still has.
        newest: weights that it has taken last.
        is_alive: serves, as far as is known.
        sleeping: tags of the memory that it has released.
        looked: what its progress was when it last changed, and when that was; None before the first look.
    """

    servers: list[ActorHandle]
    restarts_left: int
    newest: Weights | None = None
    is_alive: bool = True
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


class WeightDelivery:
    """Keeps the newest weights for replicas that come back, and hands weights over.

    Args:
        devices: of a replica.
    """

    def __init__(self, devices: int) -> None:
        self._devices = devices
        self._newest: Weights | None = None
        self._elsewhere: tuple[Weights, Any] | None = None
        # The servers in the group that weights were broadcast in last.
        self._group: tuple[list[ActorHandle], Broadcast] | None = None
        # Two calls at once could reach the actor's ranks in different orders, which would then wait for each other.
        self._actor_is_free = asyncio.Lock()

    def note(self, weights: Weights) -> None:
        """These are the newest ones."""
        self._newest, self._elsewhere = weights, None

    async def load(self, member: ReplicaState) -> None:
        """Give a replica the newest weights.

        Raises:
            EngineError: it refuses them.
            WorkerError: it died.
        """
        while self._newest is not None and member.newest is not self._newest:
            weights = self._newest
            if weights.sender is not None:
                await self.broadcast(weights, [member])
            else:
                await member.server.call("update_weights", await self._update_for(member, weights), weights.version)
                member.newest = weights

    async def _update_for(self, member: ReplicaState, weights: Weights) -> Any:
        files = weights.update.files
        if weights.elsewhere is None or await member.server.call("can_read", files):
            return weights.update
        async with self._actor_is_free:
            if self._elsewhere is None or self._elsewhere[0] is not weights:
                self._elsewhere = weights, await asyncio.to_thread(weights.elsewhere)
            return self._elsewhere[1]

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
        await member.server.call("update_weights", WeightUpdate(broadcast=broadcast), weights.version)
        member.newest = weights
