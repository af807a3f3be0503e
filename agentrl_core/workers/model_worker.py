"""A model of a run: loading, passes over batches, updates and checkpoints.

Actor, critic and reference say only what they compute.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from agentrl_core.api.errors import AgentRLError
from agentrl_core.api.training_backend import (
    IMAGES,
    SEQUENCE_COLUMNS,
    AdapterPlan,
    Columns,
    MicroBatch,
    TrainingBackend,
    TrainingContext,
    Wanted,
)
from agentrl_core.config import ResolvedConfig
from agentrl_core.config.schema import POLICY
from agentrl_core.controller import Dispatch, Worker, register
from agentrl_core.controller.dispatch import Call, DispatchMode, Plan, Ranks, collect_batch, plan_dp_compute_proto
from agentrl_core.engine_kit.media import MediaSource
from agentrl_core.plugins.boundary import hang_reported
from agentrl_core.protocol import DataProto
from agentrl_core.runs.atomic import flushed_checksum
from agentrl_core.workers.background import in_thread
from agentrl_core.workers.devices import engine_dtype, resolve_device
from agentrl_core.workers.image_columns import images_to_share
from agentrl_core.workers.micro_batching import columns_of, map_micro_batches, rank_of_rows
from agentrl_core.workers.profiling import start_profile, stop_profile
from agentrl_core.workers.protocols import DeviceMemory
from agentrl_core.workers.ranks import TrainingRanks
from agentrl_core.workers.sent_rows import unpadded
from agentrl_core.workers.shares import Sharing, parts_of, spread
from agentrl_core.workers.update import Update


def _plan_balanced(group: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    batch = args[0] if len(args) == 1 and isinstance(args[0], DataProto) and not kwargs else None
    needed = {*SEQUENCE_COLUMNS, "responses"}
    if group.world_size == 1 or batch is None or batch.batch is None or not needed <= set(batch.batch.keys()):
        return plan_dp_compute_proto(group, args, kwargs)
    parts = parts_of(group)
    batch = unpadded(batch)
    # With fewer rows than parts some get a copy of one, so that collectives of all ranks go on.
    filled = [row % len(batch) for row in range(max(parts.count, len(batch)))] if len(batch) else []
    rows = batch if len(filled) == len(batch) else batch.select_idxs(filled)
    columns = {name: rows.batch[name] for name in needed} | images_to_share(rows)
    parts_B = rank_of_rows(columns, parts.count, by_prefix=True)
    if len(set(parts_B.tolist())) < min(parts.count, len(rows)):
        parts_B = rank_of_rows(columns, parts.count, by_prefix=False)
    shares = [(parts_B == part).nonzero().squeeze(-1) for part in range(parts.count)]
    calls: list[Call | None] = [((part,), {}) for part in map(rows.select_idxs, shares)]
    back_B = torch.cat(shares).argsort()[: len(batch)]

    def collect(results: list[Any]) -> DataProto | None:
        whole = collect_batch(results)
        return None if whole is None else whole.select_idxs(back_B)

    return spread(parts, calls, collect)


BALANCED = DispatchMode("BALANCED", _plan_balanced)
"""A batch is split so that all ranks get about as many tokens; the result has the rows in the order of the batch."""


class ModelWorker(Worker):
    """Loads the model of ``config.<role>`` and computes with it, alone or as one of several ranks.

    Args:
        config: the loaded configuration.
        media: has the bytes of the images of batches; None: they have none.
    """

    role: ClassVar[str]
    """The worker's config section, and the prefix of its metrics."""

    head: ClassVar[str] = "tokens"
    """What its model has, see :class:`agentrl_core.api.training_backend.TrainingContext`."""
    trains: ClassVar[bool] = False

    def __init__(self, config: ResolvedConfig, media: MediaSource | None = None) -> None:
        super().__init__()
        self._media = media
        # It makes NaN gradients with some masks (pytorch issue 196678), and takes about a second for each new shape.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.config = config
        self._settings: Any = getattr(config, self.role)
        # Not on the CPU where torch does not see the GPU that this process was given.
        self._device = resolve_device("cuda" if self.was_given_gpu else config.cluster.device)
        self._ranks = TrainingRanks()
        self._backend: TrainingBackend
        self._profiles = False

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        own = getattr(self._settings, "path", None)
        path, key = (own, f"{self.role}.path") if own else (self.config.model.path, "model.path")
        with hang_reported(f"the {self.role}, loading {path},"):
            self._ranks = self._join()
            self._backend = self._build(self._training_context(path, key))
            with self._called("load"):
                self._backend.load()
        self._ranks.share = self._backend.share
        self._ready()

    def _join(self) -> TrainingRanks:
        return TrainingRanks.join(self, self._device)

    def _build(self, context: TrainingContext) -> TrainingBackend:
        backend: TrainingBackend = self.config.trainer.backend.build(context)
        return backend

    @contextmanager
    def _called(self, method: str) -> Iterator[None]:
        """What the backend's code raises says where; errors that it raises on purpose say it themselves."""
        try:
            yield
        except AgentRLError:
            raise
        except Exception as error:
            error.add_note(f"raised by the training backend {self.config.trainer.backend.name!r} in {method}()")
            raise

    def _training_context(self, path: str, key: str) -> TrainingContext:
        config = self.config
        return TrainingContext(
            self.role, self.head, self.trains, path, key, config.model, self._settings,  # type: ignore[arg-type]
            device=str(self._device), rank=self._ranks.rank, world_size=self._ranks.size,
            longest=config.data.max_prompt_length + config.rollout.max_response_length, seed=config.trainer.seed,
            engine_dtype=engine_dtype(config, self._device), adapters=self._adapter_plans(), media=self._media,
        )  # fmt: skip

    def _adapter_plans(self) -> Mapping[str, AdapterPlan]:
        return {}

    def _ready(self) -> None:
        """Make what goes with a model that has just been loaded."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def device_memory(self) -> DeviceMemory | None:
        """Memory of this process's GPU, without what the allocator caches; None on the CPU."""
        if self._device.type != "cuda":
            return None
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return DeviceMemory(total, free, self._backend.bytes_to_come)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sharing(self) -> Sharing:
        """How calls are spread over the ranks."""
        return Sharing(self._ranks.share, self._backend.packs_prefixes)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_profile(self) -> None:
        """Profile this process, unless somebody else in it does."""
        self._profiles = start_profile()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def stop_profile(self, directory: str) -> None:
        """Write the profile that :meth:`start_profile` began into a directory."""
        if self._profiles:
            stop_profile(Path(directory) / f"{self.role}-rank-{self.rank}")
            self._profiles = False

    def _columns_of(self, batch: DataProto, names: tuple[str, ...], method: str) -> Columns:
        """As :func:`columns_of`, with the images of the rows if there may be some.

        Raises:
            ImageError: there are some, and the model is shown none.
        """
        columns, images = columns_of(batch, names, method), batch.non_tensor_batch.get(IMAGES)
        return columns | self._backend.image_columns(None if images is None else list(images), columns, method)

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """A phase of forward passes: the model is on the device, and packs."""
        self._backend.use()
        with self._backend.on_device():
            yield

    def _map(self, batch: DataProto, method: str, wanted: Wanted, results: Mapping[str, str]) -> DataProto:
        """Columns [B, R] of what the model says of each token, without gradients.

        Args:
            results: the field of :class:`Outputs` that each column gets.
        """
        with torch.no_grad(), self._computing():
            columns = self._computed(self._columns_of(batch, (), method), wanted, results)
        return DataProto.from_dict(tensors=columns)

    def _computed(self, columns: Columns, wanted: Wanted, results: Mapping[str, str]) -> Columns:
        def compute(micros: Sequence[MicroBatch]) -> Iterator[tuple[Tensor, ...]]:
            with self._called("forward"):
                for outputs in self._backend.forward(micros, wanted):
                    # Ranks whose results do not count may have none.
                    counts = self._ranks.share.counts
                    yield tuple(getattr(outputs, field) for field in results.values()) if counts else ()

        return map_micro_batches(
            columns, self._settings.micro_batch_tokens, self._device, compute, tuple(results), self._ranks,
            by_prefix=self._backend.packs_prefixes,
        )  # fmt: skip

    def close(self) -> None:
        """Forget the model and leave the other ranks."""
        if hasattr(self, "_backend"):
            self._backend.close()
        self._ranks.close()


class TrainingWorker(ModelWorker):
    """A model with an optimizer.

    Args:
        config: the loaded configuration.
        total_optimizer_steps: of the whole run, for the learning-rate schedule.
        media: see :class:`ModelWorker`.
    """

    trains = True

    def __init__(self, config: ResolvedConfig, total_optimizer_steps: int, media: MediaSource | None = None) -> None:
        super().__init__(config, media)
        self._total_optimizer_steps = total_optimizer_steps
        self._writing: Future[dict[str, str]] | None = None

    def _adapter_plans(self) -> Mapping[str, AdapterPlan]:
        settings = self.config.model.adapter
        # Not that of model.adapter.path: what a policy has learned is not for values.
        return {} if settings is None else {POLICY: AdapterPlan(settings, None, self.config.trainer.seed)}

    def _ready(self) -> None:
        self._update = Update(
            self.role,
            self._backend,
            self._settings,
            self._total_optimizer_steps,
            self.config.algorithm.aggregation if self.role == "actor" else "token-mean",
            self.config.rollout.max_response_length,
            self._device,
            self._ranks,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sharing(self) -> Sharing:
        return super().sharing()._replace(epochs=self._settings.epochs, mini_batches=self._settings.mini_batches)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str, background: bool = False, last_files: Sequence[str] = ()) -> None:
        """Copy the state to host memory and write it from there; in the ``background`` return after the copy."""
        self.checkpoint_written()
        self._backend.last_files = last_files
        with self._called("snapshot"):
            write = self._backend.snapshot()
        kept = dict.fromkeys(self._backend.kept_files, "")

        def written() -> dict[str, str]:
            return kept | {name: flushed_checksum(Path(path) / name) for name in write(path)}

        self._writing = in_thread(written)
        if not background:
            self.checkpoint_written()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checkpoint_written(self, wait: bool = True) -> dict[str, str] | None:
        """SHA-256 of what this rank has written of the last checkpoint, empty for files that it shares with the one
        before; None while the rank writes, unless it shall ``wait``."""
        writing = self._writing
        if writing is None:
            return {}
        return writing.result() if wait or writing.done() else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        with self._called("restore"):
            self._backend.restore(path)
