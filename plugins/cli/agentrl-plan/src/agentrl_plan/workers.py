"""The phases of a step, run by the workers on tensors without data."""

import gc
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from agentrl_core.api.errors import SimulationError
from agentrl_core.api.training_backend import Columns, TrainingContext
from agentrl_core.config import ResolvedConfig
from agentrl_core.config.schema import BackendSlot
from agentrl_core.fsdp2.backend import Fsdp2
from agentrl_core.fsdp2.mesh import Mesh
from agentrl_core.fsdp2.models import empty_causal_lm
from agentrl_core.fsdp2.plugin import FSDP2
from agentrl_core.fsdp2.sharding import arrange, decoder_layers
from agentrl_core.protocol import DataProto
from agentrl_core.workers.actor import ActorWorker
from agentrl_core.workers.critic import CriticWorker
from agentrl_core.workers.model_worker import ModelWorker
from agentrl_core.workers.ranks import TrainingRanks
from agentrl_core.workers.reference import ReferenceWorker, TeacherWorker
from agentrl_plan.batches import MICRO_BATCHES, Shape, batch_of, full_micro_batch, samples_of_a_prompt
from agentrl_plan.cuda import imitated_cuda
from agentrl_plan.depth import AllLayersNeeded, Layers
from agentrl_plan.ledger import GRADIENTS, MOMENTS, STEP, WEIGHTS, Ledger, Phase
from agentrl_plan.mode import outside, simulated
from agentrl_plan.operations import Groups

BUCKET_BYTES = 256 << 20
"""Size of the buckets in which weights are sent."""
MOST_RANKS = 2048
"""Torch cuts every parameter into a piece for each: with these it takes about a minute."""
_ALLOCATION = 512
"""Bytes to which CUDA's allocator rounds up."""


class _Backend(Fsdp2):
    """A model without data, as one of several ranks."""

    def __init__(self, config: Any, context: TrainingContext, ledger: Ledger, every_layer: bool) -> None:
        super().__init__(config, context)
        self._ledger, self._every_layer = ledger, every_layer
        self.layers: Layers

    def _make_mesh(self) -> Mesh | None:
        mesh: Mesh | None = outside(super()._make_mesh)()
        return mesh

    def _place(self) -> Any:
        self._model = model = self._empty()
        self.layers = Layers(self._language_model, decoder_layers(model), self._ledger, self._every_layer)
        _without_data(model, self._device)
        arrange(model, self._mesh, self.context.model.compute_dtype, self._device)
        return model.eval()


class _Ranks(TrainingRanks):
    """The first of some, all of which are taken to say what it says."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size)

    def summed(self, values: Mapping[str, float]) -> dict[str, float]:
        return dict(values)


class _Simulated(ModelWorker):
    """A worker with such a model."""

    _backend: _Backend

    def on(self, device: torch.device, ranks: int, ledger: Ledger, every_layer: bool) -> Any:
        self._device, self._size, self._ledger, self._every_layer = device, ranks, ledger, every_layer
        return self

    def _join(self) -> TrainingRanks:
        return _Ranks(self._size)

    def _build(self, context: TrainingContext) -> _Backend:
        return _Backend(self.config.trainer.backend.config, context, self._ledger, self._every_layer)

    @property
    def layers(self) -> Layers:
        """Of its model."""
        return self._backend.layers


class _Actor(_Simulated, ActorWorker):
    def _columns_of(self, batch: DataProto, names: tuple[str, ...], method: str) -> Columns:
        # Without the experts that an engine chose: a few bytes of each token.
        return ModelWorker._columns_of(self, batch, names, method)


class _Critic(_Simulated, CriticWorker):
    pass


class _Reference(_Simulated, ReferenceWorker):
    pass


class _Teacher(_Simulated, TeacherWorker):
    pass


@dataclass(frozen=True)
class Simulated:
    """What the training processes of a step take, on one rank.

    Args:
        phases: by name.
        resting: bytes between phases, while engines sample.
        parameters: of the actor's model, of all ranks together.
        parameter_bytes: of the same.
        shape: of the micro-batch that was simulated last.
        shares: among which the ranks divide the rows of a batch.
        tokens: of all rows of a share that were simulated, prompts of each row counted.
        logits: by dtype, the shape of the largest tensor over the vocabulary.
        packs: rows can be packed.
        layers: of the actor's model, that were computed with at most.
    """

    phases: Mapping[str, Phase]
    resting: int
    parameters: int
    parameter_bytes: int
    shape: Shape
    shares: int
    tokens: int
    logits: Mapping[str, tuple[int, ...]]
    packs: bool
    layers: int


def simulate(
    config: ResolvedConfig, device: str = "cuda", ranks: int | None = None, every_layer: bool = False
) -> Simulated:
    """Run the phases of one step on one of several ranks.

    Args:
        config: of the run.
        device: type of the device for torch.
        ranks: on one node; None: those of the configuration.
        every_layer: compute with all layers, also where a few of them are enough.

    Raises:
        ConfigError: the backend's options do not divide the ranks or the model.
        SimulationError: the model's code needs values, or an operation has no implementation without data.
    """
    groups = Groups(config.cluster.processes_per_node if ranks is None else ranks)
    ranks = config.cluster.processes if ranks is None else ranks
    _check_backend(config.trainer.backend)
    if ranks > MOST_RANKS:
        raise SimulationError(f"{ranks} training processes are more than the {MOST_RANKS} that are simulated")
    config = copy(config)
    config.cluster = copy(config.cluster)
    # What the workers ask this machine for; they are told which device they have.
    config.cluster.device = "cpu"
    vocabulary = int(empty_causal_lm(config.model.path, config.model).config.get_text_config().vocab_size)
    vocabularies = {vocabulary, vocabulary // config.trainer.backend.config.tensor_parallel}
    try:
        with _ranks(ranks), ExitStack() as stack:
            ledger = Ledger(_rounded if device == "cuda" else lambda nbytes: nbytes)
            mode = stack.enter_context(simulated(ledger, device, vocabularies, groups))
            if device == "cuda":
                stack.enter_context(imitated_cuda(mode))
            place = torch.device(device, 0) if device == "cuda" else torch.device(device)
            with _collected():
                return _Step(config, ledger, place, ranks, every_layer).run(mode.largest_logits)
    except AllLayersNeeded:
        pass
    except (NotImplementedError, RuntimeError, TypeError, AttributeError) as error:
        raise SimulationError(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
    return simulate(config, device, ranks, every_layer=True)


def _check_backend(slot: BackendSlot) -> None:
    if slot.plugin.spec.factory != FSDP2.factory:
        raise SimulationError(f"trainer.backend.name: {slot.name} cannot be simulated; only {FSDP2.name} can")


class _Step:
    def __init__(
        self, config: ResolvedConfig, ledger: Ledger, device: torch.device, ranks: int, every_layer: bool
    ) -> None:
        self._config = config
        self._ledger = ledger
        place = (device, ranks, ledger, every_layer)
        self._actor = _Actor(config, 1).on(*place)
        self._critic = _Critic(config, 1).on(*place) if config.needs_critic else None
        self._reference: Any = None
        if config.needs_reference:
            self._reference = self._actor if config.reference_is_adapted else _Reference(config).on(*place)
        self._teacher: Any = None
        if config.teacher.path:
            self._teacher = self._actor if config.teacher_is_adapted else _Teacher(config).on(*place)

    def run(self, logits: Mapping[str, tuple[int, ...]]) -> Simulated:
        roles = (self._actor, self._critic, self._reference, self._teacher)
        models = list(dict.fromkeys(each for each in roles if each is not None))
        # Values are not compared here: whether a model can train is found out before a run, and in it.
        module = "agentrl_core.fsdp2.backend"
        with patch(f"{module}.check_padding"), patch(f"{module}.replayed_routers", return_value=None):
            for worker in models:
                worker.init_model()
                self._name(worker)
        gc.collect()
        # The models stay: they are not looked at again.
        gc.freeze()
        config, actor = self._config, self._actor
        shape = full_micro_batch(config, config.actor.micro_batch_tokens)
        shapes = [shape]
        if actor._backend.packs_prefixes and (shared := samples_of_a_prompt(config, config.actor.micro_batch_tokens)):
            shapes.append(shared)
        shares = actor._backend.share.count
        phases: dict[str, Phase] = {}
        for name, worker, run in self._runs(shares):
            phases[name] = self._phase(worker.layers, run, shapes)
        with self._ledger.during() as phases["send weights"]:
            # Not a loop, whose variable would keep the last bucket.
            deque(actor._backend.weights(BUCKET_BYTES, on_host=False), maxlen=0)
        gc.collect()
        parameters = list(actor._backend.module.parameters())
        return Simulated(
            phases, self._ledger.total,
            sum(each.numel() for each in parameters), sum(each.numel() * each.element_size() for each in parameters),
            shapes[-1], shares, sum(each.tokens for each in shapes) * MICRO_BATCHES, dict(logits), len(shapes) > 1,
            actor.layers.depth.more,
        )  # fmt: skip

    def _runs(self, shares: int) -> Iterator[tuple[str, _Simulated, Callable[[Shape], Any]]]:
        """Phases of a step in their order, and what each computes from micro-batches of a shape."""

        def own(run: Callable[[DataProto], Any]) -> Callable[[Shape], Any]:
            return lambda shape: run(batch_of(shape, shares)[: shape.rows * MICRO_BATCHES])

        def whole(run: Callable[[DataProto], Any]) -> Callable[[Shape], Any]:
            return lambda shape: run(batch_of(shape, shares))

        yield "log-probs", self._actor, own(self._actor.compute_log_prob)
        for name, worker in (("reference", self._reference), ("teacher", self._teacher)):
            if worker is not None:
                yield name, worker, own(worker.compute_ref_log_prob)
        if self._critic is not None:
            yield "values", self._critic, own(self._critic.compute_values)
            yield "critic update", self._critic, whole(self._critic.update)
        yield "update", self._actor, whole(self._actor.update)

    def _phase(self, layers: Layers, run: Callable[[Shape], Any], shapes: Sequence[Shape]) -> Phase:
        """A phase of all layers, from those of a few."""
        found = []
        for count in sorted({layers.depth.less, layers.depth.more}):
            layers.compute(count)
            with self._ledger.during() as phase:
                for shape in shapes:
                    run(shape)
            gc.collect()
            found.append(phase)
        result = found[0].deeper(found[-1], layers.depth.times)
        if min((value for parts in result.parts_at.values() for value in parts.values()), default=0) < 0:
            raise AllLayersNeeded
        return result

    def _name(self, worker: _Simulated) -> None:
        backend = worker._backend
        self._name_weights(backend)
        if backend.context.settings.offload_parameters:
            # Each phase brings new storages.
            backend.module.register_forward_pre_hook(lambda *_: self._name_weights(backend))
        if backend.context.trains:
            # As the first step makes them: the second one and all others find them.
            with backend.on_device():
                self._name_moments(backend)
            self._fill_steps(backend)
            trained: list[Any] = backend._optimizer.parameters
            for parameter in trained:
                parameter.register_post_accumulate_grad_hook(self._name_gradient)

    def _name_weights(self, backend: _Backend) -> None:
        for tensor in (*backend.module.parameters(), *backend.module.buffers()):
            if tensor.device == backend._device:
                self._ledger.name(_local(tensor).untyped_storage(), WEIGHTS)

    def _name_moments(self, backend: _Backend) -> None:
        for name, tensor in backend._optimizer.moments().items():
            if not name.endswith(".step") and tensor.device == backend._device:
                self._ledger.name(_local(tensor).untyped_storage(), MOMENTS)

    def _fill_steps(self, backend: Any) -> None:
        """A step has the gradients of all layers, also of those that do not compute."""
        step = backend._optimizer.step

        def whole_step(lr: float, max_norm: float) -> float:
            self._ledger.at(STEP)
            for parameter in filter(lambda each: each.requires_grad, backend.layers.idle):
                parameter.grad = torch.empty_like(parameter)
                self._name_gradient(parameter)
            norm: float = step(lr, max_norm)
            return norm

        backend._optimizer.step = whole_step

    def _name_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._ledger.name(_local(parameter.grad).untyped_storage(), GRADIENTS)


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def _collected() -> Iterator[None]:
    """No collection of cycles inside but between phases: it would take a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    # What is older than the simulation is not looked at again.
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _ALLOCATION) * _ALLOCATION


def _without_data(model: nn.Module, device: torch.device) -> None:
    """Give a skeleton parameters and buffers on a device; tied ones stay tied."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)


@contextmanager
def _ranks(count: int) -> Iterator[None]:
    """A process group of so many ranks, of which this process is the first and the only one."""
    if count == 1:
        yield
        return
    if dist.is_initialized():
        raise SimulationError("this process is one of several ranks already")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # It holds meshes of groups that are gone, and the next simulation's may be equal to them.
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
