"""A model of a run: loading, passes over batches, updates and checkpoints.

Actor, critic and reference say only what they compute.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from agentrl_core.config import ResolvedConfig
from agentrl_core.config.schema import POLICY
from agentrl_core.controller import Dispatch, Worker, register
from agentrl_core.controller.dispatch import Call, DispatchMode, Plan, Ranks, collect_batch, plan_dp_compute_proto
from agentrl_core.plugins.boundary import hang_reported
from agentrl_core.protocol import DataProto
from agentrl_core.workers.adapters import add_adapter, check_same, peft_config
from agentrl_core.workers.checkpoints import (
    checksums_of_rank,
    copied_state,
    copied_weights,
    in_thread,
    load_training_state,
    save_training_state,
)
from agentrl_core.workers.data_parallel import DataParallel
from agentrl_core.workers.log_probs import chunks_logits, response_logits
from agentrl_core.workers.micro_batching import (
    SEQUENCE_COLUMNS,
    MicroBatch,
    columns_of,
    map_micro_batches,
    rank_of_rows,
)
from agentrl_core.workers.model_files import save_adapter, save_model
from agentrl_core.workers.models import (
    check_lengths,
    empty_causal_lm,
    enable_gradient_checkpointing,
    load_causal_lm,
    resolve_device,
    vocabulary_of,
)
from agentrl_core.workers.offload import HOST, Offload
from agentrl_core.workers.optimizer import ScheduledAdamW
from agentrl_core.workers.packed_attention import Packing, check_padding
from agentrl_core.workers.profiling import start_profile, stop_profile
from agentrl_core.workers.protocols import DeviceMemory
from agentrl_core.workers.sent_rows import unpadded
from agentrl_core.workers.sharding import place, rest
from agentrl_core.workers.shares import Sharing
from agentrl_core.workers.update import Update


def _plan_balanced(group: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    batch = args[0] if len(args) == 1 and isinstance(args[0], DataProto) and not kwargs else None
    needed = {*SEQUENCE_COLUMNS, "responses"}
    if group.world_size == 1 or batch is None or batch.batch is None or not needed <= set(batch.batch.keys()):
        return plan_dp_compute_proto(group, args, kwargs)
    if len(batch) < group.world_size:
        return plan_dp_compute_proto(group, args, kwargs)
    batch = unpadded(batch)
    columns = {name: batch.batch[name] for name in needed}
    ranks_B = rank_of_rows(columns, group.world_size, by_prefix=True)
    if len(set(ranks_B.tolist())) < group.world_size:
        ranks_B = rank_of_rows(columns, group.world_size, by_prefix=False)
    shares = [(ranks_B == rank).nonzero().squeeze(-1) for rank in range(group.world_size)]
    calls: list[Call | None] = [((part,), {}) for part in map(batch.select_idxs, shares)]
    back_B = torch.cat(shares).argsort()

    def collect(results: list[Any]) -> DataProto | None:
        whole = collect_batch(results)
        return None if whole is None else whole.select_idxs(back_B)

    return Plan(calls, list(range(group.world_size)), collect)


BALANCED = DispatchMode("BALANCED", _plan_balanced)
"""A batch is split so that all ranks get about as many tokens; the result has the rows in the order of the batch."""


class ModelWorker(Worker):
    """Loads the model of ``config.<role>`` and computes with it, alone or as one of several ranks.

    Args:
        config: the loaded configuration.
    """

    role: ClassVar[str]
    """The worker's config section, and the prefix of its metrics."""

    def __init__(self, config: ResolvedConfig) -> None:
        super().__init__()
        # It makes NaN gradients with some masks (pytorch issue 196678), and takes about a second for each new shape.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.config = config
        self._settings: Any = getattr(config, self.role)
        # Not on the CPU where torch does not see the GPU that this process was given.
        self._device = resolve_device("cuda" if self.was_given_gpu else config.cluster.device)
        self._parallel = DataParallel()
        self._model: Any = None
        self._offload: Offload
        self._packing: Packing
        self._in_chunks = False
        self._profiles = False

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        model, own = self.config.model, getattr(self._settings, "path", None)
        path, key = (own, f"{self.role}.path") if own else (model.path, "model.path")
        with hang_reported(f"the {self.role}, loading {path},"):
            self._parallel = self._join()
            self._model = self._place(path, key)
        longest = self.config.data.max_prompt_length + self.config.rollout.max_response_length
        check_lengths(self._language_model.config, longest, key)
        check_padding(self._language_model, self._predict, self._device, key)
        self._packing = Packing(self._language_model, self._predict, model.packing, self._device)
        self._in_chunks = chunks_logits(self._model, self._most_logits(longest), self._device)
        rest(self._model)
        self._offload = self._ready()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def device_memory(self) -> DeviceMemory | None:
        """Memory of this process's GPU, without what the allocator caches; None on the CPU."""
        if self._device.type != "cuda":
            return None
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return DeviceMemory(total, free, self._bytes_to_come)

    @property
    def _bytes_to_come(self) -> int:
        """Device memory that this model will hold between phases, and does not yet."""
        return 0

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

    def _join(self) -> DataParallel:
        return DataParallel.join(self, self._device)

    def _place(self, path: str, key: str) -> Any:
        """The model on its device. A simulation overrides this and :meth:`_join`, and nothing else."""
        return place(
            lambda: self._load(path, key),
            lambda: self._empty(path),
            self._parallel,
            self.config.model.compute_dtype,
            self._device,
        )

    def _load(self, path: str, key: str) -> Any:
        return load_causal_lm(path, self.config.model, key)

    def _empty(self, path: str) -> Any:
        return empty_causal_lm(path, self.config.model)

    @property
    def _language_model(self) -> Any:
        """The part of the model that is one of transformers."""
        return self._model

    def _predict(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """What :class:`Packing` compares: predictions [n, C], and their places [b, r]."""
        return response_logits(self._model, micro)

    def _most_logits(self, longest: int) -> int:
        """Of a micro-batch; a row of ``longest`` tokens may be one."""
        return max(int(self._settings.micro_batch_tokens), longest) * vocabulary_of(self._model)

    @abstractmethod
    def _ready(self) -> Offload:
        """Complete a model that has just been loaded; says what waits in host memory between phases."""

    def _use(self) -> None:
        """Called before the weights are used, of a model that several workers may share."""

    @contextmanager
    def _computing(self) -> Iterator[None]:
        """A phase of forward passes: the model is on the device, and packs."""
        self._use()
        with self._offload.on_device(), self._packing.on():
            yield

    def _map(
        self,
        batch: DataProto,
        method: str,
        names: tuple[str, ...],
        function: Callable[[MicroBatch], tuple[Tensor, ...]],
    ) -> DataProto:
        """Columns ``names`` [B, R] of what ``function`` says of each micro-batch, without gradients."""
        with torch.no_grad(), self._computing():
            columns = map_micro_batches(
                columns_of(batch, (), method),
                self._settings.micro_batch_tokens,
                self._device,
                function,
                names,
                f"{self.role}.micro_batch_tokens",
                self._parallel,
                by_prefix=self._packing.is_possible,
            )
        return DataProto.from_dict(tensors=columns)

    def close(self) -> None:
        """Forget the model and leave the other ranks."""
        self._model = None
        self._parallel.close()


class TrainingWorker(ModelWorker):
    """A model with an optimizer.

    Args:
        config: the loaded configuration.
        total_optimizer_steps: of the whole run, for the learning-rate schedule.
    """

    def __init__(self, config: ResolvedConfig, total_optimizer_steps: int) -> None:
        super().__init__(config)
        self._total_optimizer_steps = total_optimizer_steps
        self._adapter: dict[str, Any] | None = None
        self._adapter_name = POLICY
        self._checkpoint_group: ProcessGroup | None = None
        self._writing: Future[dict[str, str]] | None = None

    def _ready(self) -> Offload:
        if self.config.model.gradient_checkpointing:
            enable_gradient_checkpointing(self._language_model)
        settings = self._settings
        self._optimizer = ScheduledAdamW(
            self._model.named_parameters(), settings.optimizer, settings.grad_clip, self._total_optimizer_steps,
            on_host=settings.offload_optimizer and self._device != HOST,
        )  # fmt: skip
        self._update = Update(
            self.role,
            self._model,
            self._optimizer,
            settings,
            self.config.algorithm.aggregation if self.role == "actor" else "token-mean",
            self.config.rollout.max_response_length,
            self._device,
            self._parallel,
            by_prefix=self._packing.is_possible,
        )
        return Offload(self._model, settings.offload_parameters, self._device)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sharing(self) -> Sharing | None:
        """How an update goes through a batch; None: every rank must have all rows."""
        return Sharing(self._settings.epochs, self._settings.mini_batches, self._packing.is_possible)

    @property
    def _bytes_to_come(self) -> int:
        return self._optimizer.bytes_to_come

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str, background: bool = False) -> None:
        """Copy the state to host memory and write it from there; in the ``background`` return after the copy."""
        self.checkpoint_written()
        if self._checkpoint_group is None:
            self._checkpoint_group = self._parallel.another_group()
        group = self._checkpoint_group
        self._use()
        state = copied_state(self._model, self._optimizer, group)

        def write() -> dict[str, str]:
            self._save(path, copied_weights(state))
            save_training_state(path, state, group)
            return checksums_of_rank(path, self._parallel.rank)

        self._writing = in_thread(write)
        if not background:
            self.checkpoint_written()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checkpoint_written(self, wait: bool = True) -> dict[str, str] | None:
        """What this rank has written of the last checkpoint; None while it writes, unless it shall ``wait``."""
        writing = self._writing
        if writing is None:
            return {}
        return writing.result() if wait or writing.done() else None

    def _load(self, path: str, key: str) -> Any:
        return self._adapted(load_causal_lm(path, self.config.model, key, self._device))

    def _empty(self, path: str) -> Any:
        return self._adapted(super()._empty(path))

    def _adapted(self, language_model: Any) -> Any:
        """With the adapter of ``model.adapter``, if there is one."""
        settings = self.config.model.adapter
        if settings is None:
            return language_model
        self._adapter = peft_config(language_model, settings)
        # Not that of model.adapter.path: what a policy has learned is not for values.
        return add_adapter(language_model, self._adapter, None, self.config.trainer.seed)

    def _save(self, path: str, weights: Mapping[str, Tensor]) -> None:
        """Write these weights of the model as transformers, or of its adapter as PEFT, loads them."""
        self._save_language_model(path, weights)

    def _save_language_model(self, path: str, weights: Mapping[str, Tensor]) -> None:
        if self._adapter is None:
            save_model(self._language_model, path, weights)
        else:
            save_adapter(self._language_model, path, self._adapter, weights, self.config.model.path, self._adapter_name)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        if self._adapter is not None:
            check_same(self._adapter, path)
        self._use()
        load_training_state(path, self._model, self._optimizer, self._parallel)
