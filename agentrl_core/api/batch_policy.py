"""The interface of batch policies: which groups start, and which make the next batch, while the trainer trains.

The factory ``(config, BatchPolicyContext) -> BatchPolicy`` is called once, in the trainer's process. Both methods are
called often, whenever a group has ended or weights have changed: they must return at once, and depend on their argument
only. A policy cannot break the bound: the core refuses a batch with a group that is too old.

    class Oldest(BatchPolicy):
        # Starts as many groups as allowed, and trains them strictly in the order in which they started.

        def admit(self, state):
            return state.allowed

        def select(self, state):
            first = state.groups[: state.batch_size]
            ready = len(first) == state.batch_size and all(group.ended for group in first)
            return [group.position for group in first] if ready else None
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchPolicyContext:
    """What a policy gets when it is built.

    Args:
        batch_size: groups of one batch (``data.batch_size``).
        max_staleness: versions that a trained token may be older than the weights that it updates.
        pipeline_depth: batches that may be started ahead of the trainer.
    """

    batch_size: int
    max_staleness: int
    pipeline_depth: int


@dataclass(frozen=True)
class PendingGroup:
    """The samples of one prompt that have started and are not trained yet.

    Args:
        position: of its prompt in the order of the data, from 0.
        version: of the newest weights when it started. Its tokens have this version, or newer ones.
        ended: all its samples have ended and are scored.
    """

    position: int
    version: int
    ended: bool


@dataclass(frozen=True)
class PipelineState:
    """Where a run is.

    Args:
        version: of the newest weights. The next batch is trained on them, unless ``training``.
        training: the batch of these weights has been taken, and is being trained.
        batch_size, max_staleness, pipeline_depth: see :class:`BatchPolicyContext`.
        groups: that have started and are in no batch, by position.
    """

    version: int
    training: bool
    batch_size: int
    max_staleness: int
    pipeline_depth: int
    groups: Sequence[PendingGroup]

    @property
    def next_batch(self) -> int:
        """Version of the weights that the next batch is trained on."""
        return self.version + self.training

    @property
    def allowed(self) -> int:
        """Groups that may start: while version v is the newest, (pipeline_depth + v + 1) batches may have started."""
        ahead = self.pipeline_depth + 1 - self.training
        return max(0, ahead * self.batch_size - len(self.groups))


class BatchPolicy(ABC):
    """Decides which groups start, and which are trained next."""

    @abstractmethod
    def admit(self, state: PipelineState) -> int:
        """Return how many further groups start now; more than ``state.allowed`` are not started."""

    @abstractmethod
    def select(self, state: PipelineState) -> Sequence[int] | None:
        """Return the positions of ``state.batch_size`` groups that have ended: the next batch. None: wait for more.

        Whatever is left must still be trained in time: a group that started at version v belongs into batch v +
        ``max_staleness`` at the latest, where batch k is the one that is trained on version k.
        """
