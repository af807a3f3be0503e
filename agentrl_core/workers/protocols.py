"""The roles as the trainer sees them: groups of workers are typed as these.

``batch`` has the columns ``prompts`` [B, P] (left-padded), ``responses`` [B, R] (right-padded), ``response_mask``
[B, R], ``input_ids``, ``attention_mask`` and ``position_ids`` [B, P+R]; each method names what else it reads. Paths
are directories.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from agentrl_core.api.weights import Adapter, ArrayBucket, Broadcast
from agentrl_core.protocol import DataProto

if TYPE_CHECKING:
    from agentrl_core.workers.far_files import Piece


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a training process's GPU while the process rests, in bytes.

    Args:
        total: of the GPU.
        free: what nothing holds now.
        coming: what the process will hold at rest and does not yet: AdamW's moments before the first step.
    """

    total: int
    free: int
    coming: int = 0


class Reference(Protocol):
    """A frozen policy that the KL term measures the distance to."""

    def init_model(self) -> object:
        """Load the model. Called once, before anything else."""

    def device_memory(self) -> list[DeviceMemory | None]:
        """Memory of each rank's GPU; None where it computes on the CPU. ``coming`` is this model's own."""

    def start_profile(self) -> object:
        """Start the profiler of each rank's process."""

    def stop_profile(self, directory: str) -> object:
        """Write each rank's profile into a directory."""

    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """``ref_log_prob`` [B, R] float32, 0 under mask 0. Reads ``meta_info["temperature"]``."""


class Actor(Protocol):
    """The policy that is trained."""

    def init_model(self) -> object:
        """Load the model, make the optimizer and the policy loss. Called once, before anything else."""

    def device_memory(self) -> list[DeviceMemory | None]:
        """Memory of each rank's GPU; None where it computes on the CPU. ``coming`` is this model's own."""

    def start_profile(self) -> object:
        """Start the profiler of each rank's process."""

    def stop_profile(self, directory: str) -> object:
        """Write each rank's profile into a directory."""

    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """``old_log_probs`` [B, R] float32, and ``entropys`` where ``meta_info["calculate_entropy"]`` is true.

        Both are 0 under mask 0. Reads ``meta_info["temperature"]``, that of the rollout (0: greedy, counts as 1).
        """

    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """See :class:`Reference`; only where the policy is an adapter, of the policy before the run."""

    def update(self, batch: DataProto) -> list[dict[str, float]]:
        """All optimizer steps of one batch; each rank's metrics under ``actor/``, the same on all but for memory.

        Reads also ``old_log_probs``, ``advantages``, with a KL term ``ref_log_prob``, and ``meta_info`` ``temperature``
        and ``seed`` (the order of the mini-batches follows from it). With ``meta_info["measure_only"]``, or where no
        row has a gradient, the weights stay as they are, and the metrics are those of a forward pass.
        """

    def save_checkpoint(self, path: str, background: bool = False, last_files: Sequence[str] = ()) -> object:
        """Write weights in Hugging Face layout, and what :meth:`load_checkpoint` reads. The caller makes it atomic.

        It is written from a copy in host memory; in the ``background`` this returns once the copy is made.
        """

    def checkpoint_written(self, wait: bool = True) -> list[dict[str, str] | None]:
        """Of each rank, SHA-256 of the files of the last checkpoint that it wrote, by their path in it.

        None where it still writes; with ``wait`` this waits. Raises what the write raised.
        """

    def load_checkpoint(self, path: str) -> object:
        """Go on where :meth:`save_checkpoint` was called, by any number of ranks. Raises CheckpointError."""

    def sees(self, file: str) -> list[tuple[str, bool]]:
        """Each rank's node, and whether it has this file. Raises CheckpointError where it cannot have its folder."""

    def send_piece(self, ranks: Sequence[int], folder: str) -> "list[Piece | None]":
        """The next piece of the files that each of these ranks has there; None after the last, when they are gone."""

    def take_piece(self, ranks: Sequence[int], folder: str, piece: "Piece") -> object:
        """Write a piece into a folder on the nodes of these ranks."""

    def remove_folder(self, ranks: Sequence[int], folder: str) -> object:
        """Remove a folder on the nodes of these ranks."""

    def adapter(self) -> Adapter | None:
        """The adapter that engines are sent; None: they are sent all weights, with an adapter's merged into them."""

    def weight_buckets(self, bucket_bytes: int) -> list[ArrayBucket]:
        """All weights under their Hugging Face names, tied ones once, or those of :meth:`adapter`, in buckets of about
        ``bucket_bytes``."""

    def weight_files(self) -> tuple[str, ...]:
        """The same in safetensors files on the actor's host, in memory where it has room.

        They are the same files each time, overwritten by the next call, and gone when the actor's process ends.
        """

    def keep(self, method: str, *args: Any) -> Any:
        """See :meth:`agentrl_core.controller.WorkerGroup.keep`. With ``weight_update`` and the size of a bucket: an
        update of all weights, which goes from rank 0 to the engines that it is passed to."""

    def open_broadcast(self, host: str, backend: str, receivers: int, bucket_bytes: int) -> Broadcast:
        """A group in which all weights will be sent to so many processes of engines; the one before is left.

        ``host`` is the address that rank 0 listens on; empty: the one that other hosts can reach. ``first_rank`` is
        that of the first engine.
        """

    def send_weights(self, broadcast: Broadcast, bucket_bytes: int) -> object:
        """Send all weights in a group, which is joined first where this is the first time."""


class Critic(Protocol):
    """The value function of estimators that need one."""

    def init_model(self) -> object:
        """Load the backbone, make the value head and the optimizer. Called once, before anything else."""

    def device_memory(self) -> list[DeviceMemory | None]:
        """Memory of each rank's GPU; None where it computes on the CPU. ``coming`` is this model's own."""

    def start_profile(self) -> object:
        """Start the profiler of each rank's process."""

    def stop_profile(self, directory: str) -> object:
        """Write each rank's profile into a directory."""

    def compute_values(self, batch: DataProto) -> DataProto:
        """``values`` [B, R] float32, each from before its token is sampled; 0 under mask 0."""

    def update(self, batch: DataProto) -> list[dict[str, float]]:
        """All optimizer steps of one batch; each rank's metrics under ``critic/``, the same on all but for memory.

        Reads also ``values``, ``returns`` and ``meta_info["seed"]``.
        """

    def save_checkpoint(self, path: str, background: bool = False, last_files: Sequence[str] = ()) -> object:
        """Write backbone, value head, and what :meth:`load_checkpoint` reads; see the actor's."""

    def checkpoint_written(self, wait: bool = True) -> list[dict[str, str] | None]:
        """See the actor's."""

    def load_checkpoint(self, path: str) -> object:
        """Go on where :meth:`save_checkpoint` was called, by any number of ranks. Raises CheckpointError."""
