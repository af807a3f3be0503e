"""New weights from the actor to the engines, by the road that the configuration and their places allow."""

from dataclasses import replace

from agentrl_core.api import WeightUpdate
from agentrl_core.api.weights import Broadcast
from agentrl_core.config import ResolvedConfig
from agentrl_core.serving.replicas import EngineReplicas
from agentrl_core.workers.models import resolve_device
from agentrl_core.workers.protocols import Actor

BUCKET_BYTES = 256 << 20


class WeightSync:
    """Gives the engines the actor's weights.

    Args:
        config: of the run.
        actor: whose weights they are.
        engines: that get them.
    """

    def __init__(self, config: ResolvedConfig, actor: Actor, engines: EngineReplicas) -> None:
        self._is_local = config.cluster.runtime == "local"
        self._actor = actor
        self._engines = engines
        self._sender: ActorSender | None = None
        if config.rollout.engine.weight_transfer == "broadcast":
            self._sender = ActorSender(actor, _backend(config))

    def __call__(self, version: int) -> None:
        """Returns when every engine samples with them, as this version."""
        if self._sender is not None:
            self._engines.broadcast_weights(self._sender, version)
        else:
            update, elsewhere = self._new_weights()
            self._engines.update_weights(update, version, elsewhere)

    def _new_weights(self) -> tuple[WeightUpdate, WeightUpdate | None]:
        """The module itself, files in memory on the actor's host, buckets for engines elsewhere."""
        if self._engines.context.shared_module is not None:
            return WeightUpdate(shared=True), None
        if self._is_local:
            return WeightUpdate(buckets=self._actor.weight_buckets(BUCKET_BYTES)), None
        files = self._actor.weight_files()
        elsewhere = None
        if not self._engines.can_all_read(files):
            elsewhere = WeightUpdate(buckets=self._actor.weight_buckets(BUCKET_BYTES))
        return WeightUpdate(files=files), elsewhere


def _backend(config: ResolvedConfig) -> str:
    if resolve_device(config.cluster.device).type == "cpu":
        return "gloo"
    # NCCL wants a GPU for each rank.
    return "nccl" if config.rollout.engine.placement == "standalone" else "ipc"


class ActorSender:
    """Implements :class:`agentrl_core.serving.weight_delivery.WeightSender` on the actor's workers.

    Args:
        actor: rank 0 of the groups.
        backend: of :class:`agentrl_core.api.weights.Broadcast`.
    """

    def __init__(self, actor: Actor, backend: str) -> None:
        self._actor = actor
        self._backend = backend

    def open(self, size: int) -> Broadcast:
        """See :meth:`WeightSender.open`."""
        address, buckets = self._actor.open_broadcast(BUCKET_BYTES)
        return Broadcast(address, self._backend, size, first_rank=1, buckets=tuple(buckets))

    def send(self, broadcast: Broadcast) -> None:
        """See :meth:`WeightSender.send`."""
        self._actor.send_weights(replace(broadcast, buckets=()), BUCKET_BYTES)

    def files(self) -> WeightUpdate:
        """See :meth:`WeightSender.files`."""
        return WeightUpdate(files=self._actor.weight_files())
