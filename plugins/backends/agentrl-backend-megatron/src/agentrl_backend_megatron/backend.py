"""The training backend ``megatron``: a model of the Hugging Face hub, computed and trained by Megatron-Core."""

import importlib.metadata
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from agentrl_backend_megatron.checkpoints import Checkpoints
from agentrl_backend_megatron.config import MegatronConfig
from agentrl_backend_megatron.exchange import Piece, Pieces, buckets
from agentrl_backend_megatron.families import Family
from agentrl_backend_megatron.files import HubFiles
from agentrl_backend_megatron.groups import join, leave, share
from agentrl_backend_megatron.mesh import Mesh
from agentrl_backend_megatron.model import HiddenStates, build, transformer_config
from agentrl_backend_megatron.names import EMBEDDING, OUTPUT, Unit, units_of
from agentrl_backend_megatron.optimizer import Optimizer
from agentrl_backend_megatron.passes import Passes
from agentrl_core.api.errors import ConfigError, WorkerError
from agentrl_core.api.training_backend import (
    Columns,
    DataShare,
    Loss,
    MicroBatch,
    Outputs,
    TrainingBackend,
    TrainingContext,
    Wanted,
    described,
)
from agentrl_core.api.weights import ArrayBucket

logger = logging.getLogger(__name__)
TESTED = "0.16.1"


class Megatron(TrainingBackend):
    """See :class:`TrainingBackend`.

    Args:
        config: the plugin's options.
        context: which model, for what, and where.
    """

    config: MegatronConfig

    def __init__(self, config: MegatronConfig, context: TrainingContext) -> None:
        super().__init__(config, context)
        self._device = torch.device(context.device)
        self._mesh: Mesh | None = None
        self._model: HiddenStates | None = None
        self._optimizer: Optimizer | None = None

    # Loading ------------------------------------------------------------------------------------------------------

    def load(self) -> None:
        context, key = self.context, self.context.key
        if context.head != "tokens":
            raise ConfigError(
                "trainer.backend.name: megatron trains no critic; choose an algorithm without one, or fsdp2"
            )
        found = importlib.metadata.version("megatron-core")
        if found != TESTED:
            logger.warning("megatron-core %s is installed; this backend was tested with %s", found, TESTED)
        self._hub = HubFiles(context.path, key)
        self._family = Family.of(self._hub.config, key)
        mesh = Mesh.of(self.config, self._family, context.world_size)
        join(mesh, self._device, context.seed)
        self._mesh = mesh
        made = transformer_config(
            self.config, self._family, mesh, self._dtype, context.trains and context.model.gradient_checkpointing
        )  # fmt: skip
        self._model = build(made, self.config, self._family, mesh, context.longest).to(self._device).eval()
        self._units = units_of(self._family)
        self._names = self._local_names()
        for name, parameter in self._model.named_parameters():
            # Megatron-Core says so only of what it has initialized: the norm of gradients counts others once.
            parameter.tensor_model_parallel = self._names[name].is_split
            # And it adds up gradients of experts as others if expert_parallel is 1, whatever tensor_parallel is.
            parameter.allreduce = self._names[name].expert is None
        self._take(self._hub.tensor)
        if context.trains:
            self._optimizer = Optimizer(
                self._model, context.settings.optimizer, self.config.reduce_gradients_in_float32
            )  # fmt: skip
        else:
            self._model.requires_grad_(False)
        outer = self._model if self._optimizer is None else self._optimizer.model
        self._passes = Passes(outer, self._model, self._family.vocabulary)
        self._pieces = Pieces(
            self._whole_shards(), mesh.tensor, context.rank, context.world_size
        )  # fmt: skip
        self._checkpoints: Checkpoints | None = None

    @property
    def _dtype(self) -> torch.dtype:
        """Of parameters and passes. With bfloat16 the optimizer has a copy of them in float32."""
        model = self.context.model
        name = model.compute_dtype or ("bfloat16" if self._device.type == "cuda" else model.dtype)
        if name == "float16":
            raise ConfigError("model.compute_dtype: found float16, megatron trains in float32 or bfloat16; set one")
        return torch.float32 if name == "float32" else torch.bfloat16

    def _local_names(self) -> dict[str, Unit]:
        """This rank's parameters by name, with the units that they are."""
        model, mesh = self._loaded, self._mesh
        assert mesh is not None
        first_layer = parallel_state.get_pipeline_model_parallel_rank() * self._family.layers // mesh.pipeline
        first_expert = parallel_state.get_expert_model_parallel_rank() * self._family.experts // mesh.expert
        own, found = {name for name, _ in model.named_parameters()}, dict[str, Unit]()
        for unit in self._units:
            for name in unit.names_in(first_layer, first_expert):
                if name in own:
                    found[name] = unit
        if self._family.is_tied and OUTPUT in own:
            # The last stage has a copy of the embedding.
            found[OUTPUT] = next(unit for unit in self._units if unit.name == EMBEDDING)
        if missing := sorted(own - found.keys()):
            raise ConfigError(f"{self.context.key}: megatron has no names for {', '.join(missing)}; use another model")
        return found

    @property
    def _loaded(self) -> HiddenStates:
        if self._model is None:
            raise WorkerError("the training backend megatron has no model: load() comes first")
        return self._model

    def _take(self, tensor: Callable[[str], Tensor]) -> None:
        """Set this rank's weights from those of the hub by name."""
        index = parallel_state.get_tensor_model_parallel_rank()
        count = parallel_state.get_tensor_model_parallel_world_size()
        with torch.no_grad():
            for name, parameter in self._loaded.named_parameters():
                unit = self._names[name]
                parameter.copy_(unit.shard(unit.joined([tensor(each) for each in unit.hub]), index, count))

    def _whole_shards(self) -> dict[str, Piece]:
        """The shards that this rank gives away: of several ranks that have the same one, the first does."""
        state, found = parallel_state, dict[str, Piece]()
        index = state.get_tensor_model_parallel_rank()
        is_first = state.get_data_parallel_rank(with_context_parallel=True) == 0
        for name, parameter in self._loaded.named_parameters():
            unit = self._names[name]
            gives = is_first and (unit.cut != "whole" or index == 0)
            if unit.expert is not None:
                gives = state.get_expert_data_parallel_rank() == 0
            if gives and not (name == OUTPUT and unit.name == EMBEDDING):
                found[_key(unit)] = Piece(
                    self.context.rank, 0 if unit.cut == "whole" else index, 0, parameter.numel()
                )  # fmt: skip
        return found

    @property
    def share(self) -> DataShare:
        assert self._mesh is not None, "load() comes first"
        return share()

    # Passes -------------------------------------------------------------------------------------------------------

    def forward(self, micros: Sequence[MicroBatch], wanted: Wanted) -> Iterator[Outputs]:
        yield from self._passes.forward(micros, wanted)

    def forward_backward(self, micros: Sequence[MicroBatch], wanted: Wanted, loss: Loss) -> None:
        self._passes.forward_backward(micros, wanted, loss)

    @contextmanager
    def _training(self) -> Iterator[None]:
        self._loaded.train()
        try:
            yield
        finally:
            self._loaded.eval()

    def updating(self, seed: int) -> AbstractContextManager[None]:
        return self._training()

    @property
    def _trained(self) -> Optimizer:
        if self._optimizer is None:
            raise WorkerError(f"the {self.context.role} is not trained")
        return self._optimizer

    def optimizer_step(self, lr: float, max_norm: float) -> float:
        return self._trained.step(lr, max_norm)

    def zero_grad(self) -> None:
        self._trained.zero_grad()

    # Weights ------------------------------------------------------------------------------------------------------

    @property
    def _engine_dtype(self) -> torch.dtype:
        return getattr(torch, self.context.engine_dtype)  # type: ignore[no-any-return]

    def weights(self, bucket_bytes: int, on_host: bool = True, everywhere: bool = False) -> Iterator[Columns]:
        own = {_key(unit): name for name, unit in self._names.items() if name != OUTPUT or unit.name == OUTPUT}
        parameters = dict(self._loaded.named_parameters())
        dtype, is_first = self._engine_dtype, self.context.rank == 0
        for bucket in buckets(self._units, dtype.itemsize, bucket_bytes):
            found: Columns = {}
            for unit in bucket:
                key = _key(unit)
                whole = self._pieces.whole(
                    unit, key, 0, lambda key=key: parameters[own[key]].detach().flatten().to(dtype),  # type: ignore[misc]
                    dtype, self._device,
                )  # fmt: skip
                if everywhere and self.context.world_size > 1:
                    whole = self._from_first(unit, whole)
                if whole is not None and (is_first or everywhere):
                    found |= unit.separated(whole)
            yield {name: tensor.cpu() for name, tensor in found.items()} if on_host else found

    def _from_first(self, unit: Unit, whole: Tensor | None) -> Tensor:
        if whole is None:
            whole = torch.empty(unit.shard_shape(1), dtype=self._engine_dtype, device=self._device)
        whole = whole.contiguous()
        dist.broadcast(whole, 0)
        return whole

    def weight_layout(self, bucket_bytes: int) -> list[ArrayBucket]:
        dtype = self._engine_dtype
        return [
            described({
                name: torch.empty(shape, dtype=dtype, device="meta")
                for unit in bucket for name, shape in zip(unit.hub, unit.shapes, strict=True)
            })
            for bucket in buckets(self._units, dtype.itemsize, bucket_bytes)
        ]  # fmt: skip

    # Checkpoints --------------------------------------------------------------------------------------------------

    def snapshot(self) -> Callable[[str], Sequence[str]]:
        return self._stored.copied(self.steps)

    def restore(self, path: str) -> None:
        self.steps = self._stored.restore(path, self._take)

    @property
    def _stored(self) -> Checkpoints:
        if self._checkpoints is None:
            assert self._mesh is not None, "load() comes first"
            self._checkpoints = Checkpoints(
                self._trained, self._names, self._units, self._mesh, self._hub, self.context,
                parallel_state.get_tensor_model_parallel_rank(),
            )  # fmt: skip
        return self._checkpoints

    def close(self) -> None:
        self._model = self._optimizer = None
        if self._mesh is not None:
            leave(self._mesh)
            self._mesh = None


def _key(unit: Unit) -> str:
    """Names a unit among all."""
    return unit.hub[0]
