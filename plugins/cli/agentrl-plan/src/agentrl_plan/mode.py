"""Runs torch code on tensors without data, and keeps account of what it does."""

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from agentrl_core.api.errors import SimulationError
from agentrl_plan.known import LARGEST, Known, forget, is_fake, known_of, no_dispatch, set_known
from agentrl_plan.ledger import GATHERED, LOGITS, Ledger
from agentrl_plan.operations import Groups, collective_of, operations_of, workspace_bytes

aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_SCALARS = (aten._local_scalar_dense.default, aten.equal.default)
_UNKNOWN = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "rand", "randn", "uniform_", "normal_"}
)
_INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
_GROUPED = aten._grouped_mm.default
_ALL_TO_ALL = torch.ops.c10d.alltoall_base_.default
_CHOSEN = (aten.topk.default, aten.sort.default, aten.sort.stable, aten.argmax.default)
"""Operations whose indices depend on the model: experts, which a simulation takes to be chosen equally often."""


class Simulation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, tensors have no data; see :func:`simulated`.

    Args:
        fake: makes the tensors.
        ledger: keeps account of the memory of ``device``.
        device: the type of the device that computes.
        vocabularies: the sizes by which logits are known.
        groups: of the ranks.
    """

    def __init__(
        self, fake: FakeTensorMode, ledger: Ledger, device: str, vocabularies: Collection[int], groups: Groups
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = fake
        self._device = device
        self._vocabularies = vocabularies
        self._groups = groups
        self._is_passed_on = False
        self.ledger = ledger
        self.hides_device = False
        """See :meth:`device_hidden`."""
        self.only_shapes = False
        """Keep no account: torch asks for the shapes of whole tensors, of which there are only shards."""
        self.largest_logits: dict[str, tuple[int, ...]] = {}
        """By dtype, the shape of the largest tensor over the vocabulary that is no weight."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return self._on_shards(func, args, kwargs or {})
        if func is _DEVICE:
            return torch.device("meta") if self.hides_device else args[0].fake_device
        kwargs = kwargs or {}
        if kwargs.get("pin_memory"):
            # The host's memory is not accounted for, and pinning it would ask for CUDA.
            kwargs = {**kwargs, "pin_memory": False}
        if self.hides_device and kwargs.get("device") is not None and kwargs["device"].type == "meta":
            kwargs = {**kwargs, "device": torch.device(self._device, 0)}
        tensors = list(_tensors(args, kwargs))
        if any(not is_fake(each) for each in tensors):
            args, kwargs = tree_map_only(Tensor, self._as_fake, (args, kwargs))
            tensors = list(_tensors(args, kwargs))
        if func.namespace == "c10d" or func.namespace == "_c10d_functional":
            self._note_collective(func, args, tensors)
            if func is _ALL_TO_ALL and (sent := known_of(args[1])) is not None:
                return self._received(func, args, sent.tensor)
        if func in _INDEXED:
            args = self._with_places(args)
            tensors = list(_tensors(args, kwargs))
        known = self._known(func, tensors, args, kwargs)
        if func in _SCALARS:
            return self._scalar(func, known, tensors)
        try:
            if func is _GROUPED and args[0].dtype != torch.bfloat16:
                result = _product_of_groups(*args, **kwargs)
            else:
                result = func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            if known is None:
                raise SimulationError(f"the result of {func} depends on values that no simulation has") from error
            result = tree_map_only(Tensor, lambda each: self._like(each, tensors), known)
        self._note(func, args, kwargs, tensors, result)
        if known is not None:
            self._keep(known, result, tensors)
        elif func in _CHOSEN:
            _choose_equally(func, result, tensors[0])
        return result

    @contextmanager
    def device_hidden(self, hides: bool = True) -> Iterator[None]:
        """Inside, torch's own code in C++ is told that tensors are nowhere: it would ask for an accelerator."""
        before, self.hides_device = self.hides_device, hides
        try:
            yield
        finally:
            self.hides_device = before

    def _on_shards(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What torch makes of an operation on shards, whose results are nowhere on a simulated GPU, as in the backward
        pass; the operations on this rank's parts come back here."""
        if self._is_passed_on:
            self._is_passed_on = False
            return NotImplemented
        self._is_passed_on = True
        with self, self.device_hidden(self._device == "cuda"):
            return func(*args, **kwargs)

    def _received(self, func: Any, args: Any, sent: Tensor) -> Any:
        """Every rank is taken to send what this one, the first, does: how many tokens go to which experts."""
        result = func(*args)
        ranks = self._groups.ranks_of(args).count
        with no_dispatch():
            set_known(args[0], Known(torch.cat([sent.chunk(ranks)[0]] * ranks)))
        return result

    def _as_fake(self, tensor: Tensor) -> Tensor:
        if is_fake(tensor):
            return tensor
        if tensor.device.type == "meta":
            # Without the reference that a converter keeps: the modules of a skeleton swap their parameters.
            with self._fake:
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        fake = self._fake.from_tensor(tensor)
        if known_of(fake) is None and tensor.numel() <= LARGEST:
            with no_dispatch():
                set_known(fake, Known(tensor.detach()))
        return fake

    def _known(self, func: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        """What the operation gives for the values of its arguments; None where one of them is unknown."""
        knowns = [known_of(each) for each in tensors]
        name = func._schema.name.partition("::")[2]
        if None in knowns or name in _UNKNOWN or (not tensors and _elements(args) > LARGEST):
            if func._schema.is_mutable:
                for each in _written(func, args, kwargs):
                    forget(each)
            return None
        if any(each.numel() > LARGEST for each in tensors):
            return None
        if "device" in kwargs and kwargs["device"] is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        with no_dispatch():
            values = tree_map_only(Tensor, lambda each: known_of(each).tensor, (args, kwargs))  # type: ignore[union-attr]
            try:
                return func(*values[0], **values[1])
            except NotImplementedError:
                # The host has no such operation for this dtype.
                return None

    def _scalar(self, func: Any, known: Any, tensors: list[Tensor]) -> Any:
        if known is not None:
            return known
        if func is aten.equal.default:
            return True
        if tensors[0].dtype.is_floating_point:
            return 0.0
        raise SimulationError(f"a value of a tensor {list(tensors[0].shape)} is asked for, which no simulation has")

    def _like(self, known: Tensor, tensors: list[Tensor]) -> Tensor:
        device = tensors[0].device if tensors else torch.device("cpu")
        return torch.empty_strided(known.shape, known.stride(), dtype=known.dtype, device=device)

    def _keep(self, known: Any, result: Any, tensors: list[Tensor]) -> None:
        values = known if isinstance(known, tuple | list) else (known,)
        results = result if isinstance(result, tuple | list) else (result,)
        owners = {k.tensor.untyped_storage()._cdata: k for each in tensors if (k := known_of(each)) is not None}
        for value, each in zip(values, results, strict=True):
            if isinstance(value, Tensor) and is_fake(each) and value.numel() <= LARGEST:
                owner = owners.get(value.untyped_storage()._cdata)
                set_known(each, Known(value) if owner is None else owner.same_memory(value))

    def _with_places(self, args: Any) -> Any:
        """Indices in place of masks, whose number of places is known here and not to a fake tensor."""
        indices: list[Any] = []
        for index in args[1]:
            if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
                indices += self._places(index)
            else:
                indices.append(index)
        return (args[0], indices, *args[2:])

    def _places(self, mask: Tensor) -> list[Tensor]:
        known = known_of(mask)
        if known is None:
            raise SimulationError(
                f"a mask of {list(mask.shape)} selects a number of elements that depends on unknown values"
            )
        with no_dispatch():
            places = [each.contiguous() for each in known.tensor.nonzero().unbind(1)]
        fakes = [self._like(each, [mask]) for each in places]
        for fake, each in zip(fakes, places, strict=True):
            set_known(fake, Known(each))
            if fake.device.type == self._device:
                self.ledger.allocate(fake.untyped_storage())
        return fakes

    def _note(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], result: Any) -> None:
        if self.only_shapes:
            return
        phase = self.ledger.phase
        for each in result if isinstance(result, tuple | list) else (result,):
            if is_fake(each) and each.device.type == self._device:
                part = self._part(func, each)
                if part is None:
                    self.ledger.allocate(each.untyped_storage())
                else:
                    self.ledger.allocate(each.untyped_storage(), part)
        extra = workspace_bytes(func, args, tensors) if self._device == "cuda" else 0
        if extra:
            self.ledger.passing(extra)
        operations = operations_of(func, args, kwargs, result)
        if operations:
            phase.operations[str(tensors[0].dtype).removeprefix("torch.")] += operations

    def _part(self, func: Any, tensor: Tensor) -> str | None:
        shape = tensor.shape
        if (
            len(shape) < 2
            or shape[-1] not in self._vocabularies
            or func is aten.t.default
            or func is aten.transpose.int
        ):
            return None
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.numel() > _product(self.largest_logits.get(dtype, ())):
            self.largest_logits[dtype] = tuple(shape)
        return LOGITS

    def _note_collective(self, func: Any, args: Any, tensors: list[Tensor]) -> None:
        name, nbytes = collective_of(func, tensors, self._device, self._groups.ranks_of(args))
        if nbytes:
            phase = self.ledger.phase
            phase.collectives[name] += nbytes
            phase.calls[name] += 1
            if phase.passes == 1:
                phase.each_pass[name] += nbytes
        for each in tensors:
            if each.device.type == self._device:
                self.ledger.name(each.untyped_storage(), GATHERED)


def outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose tensors have data."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with no_dispatch():
            return function(*args, **kwargs)

    return run


@contextmanager
def simulated(ledger: Ledger, device: str, vocabularies: Collection[int], groups: Groups) -> Iterator[Simulation]:
    """Run torch code on tensors without data.

    Raises:
        SimulationError: the code needs a value that only data could give.
    """
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        ledger.resize(storage)
        return result

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    mode = Simulation(fake, ledger, device, vocabularies, groups)
    swap: Any = torch.utils.swap_tensors
    shapes_of_whole = ShardingPropagator._propagate_tensor_meta_non_cached

    def swapped(*tensors: Any) -> None:
        """A module that moves its parameters; tensors to which a converter keeps references cannot be swapped."""
        fake.fake_tensor_converter.meta_converter.tensor_memo.clear()
        swap(*tensors)

    def shapes_only(*args: Any) -> Any:
        mode.only_shapes = True
        try:
            return shapes_of_whole(*args)
        finally:
            mode.only_shapes = False

    torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
    try:
        with (
            patch.object(ShardingPropagator, shapes_of_whole.__name__, shapes_only),
            # It takes fake tensors for a trace, in which causal masks are always made.
            patch("transformers.masking_utils.is_tracing", lambda *_: False),
            patch.object(torch.utils, swap.__name__, swapped),
            patch.object(FakeTensor, "numpy", _numpy, create=True),
            # Which ranks are where is known, also while models are split.
            patch.object(DeviceMesh, "__init__", outside(DeviceMesh.__init__)),
            patch.object(DeviceMesh, "mesh", property(outside(DeviceMesh.mesh.fget))),  # type: ignore[attr-defined]
            patch.object(DeviceMesh, "_get_all_submeshes", outside(DeviceMesh._get_all_submeshes)),
            # It logs a traceback of each operation that fails, whose message is in the error too.
            patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True),
            # It warns of two collectives where weights that are split twice are gathered.
            patch.object(logging.getLogger("torch.distributed.tensor._redistribute"), "disabled", True),
            fake,
            mode,
        ):
            yield mode
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


def _numpy(tensor: Tensor) -> Any:
    known = known_of(tensor)
    if known is None:
        raise SimulationError(f"the values of a tensor {list(tensor.shape)} are asked for, which no simulation has")
    with no_dispatch():
        return known.tensor.numpy()


def _tensors(args: Any, kwargs: Any) -> Iterator[Tensor]:
    for each in (*args, *kwargs.values()):
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, tuple | list):
            yield from _tensors(each, {})


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from _tensors((value,), {})


def _elements(args: Any) -> int:
    """Number of elements of the tensor that a factory makes."""
    sizes = args[0] if args and isinstance(args[0], tuple | list) else args
    return _product(tuple(size for size in sizes if isinstance(size, int)))


def _product(shape: tuple[int, ...]) -> int:
    count = 1 if shape else 0
    for size in shape:
        count *= size
    return count


def _product_of_groups(left: Tensor, right: Tensor, offsets: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """What torch's own simulation of it refuses in other types than bfloat16, which devices multiply group by group."""
    rows, columns = left.shape[-2], right.shape[-1]
    if left.ndim == right.ndim:
        groups = (left.shape[0],) if left.ndim == 3 else () if offsets is None else (offsets.shape[0],)
        return left.new_empty(*groups, rows, columns)
    return left.new_empty(rows, columns)


def _choose_equally(func: Any, result: Any, scores: Tensor) -> None:
    indices = result if isinstance(result, Tensor) else result[1]
    if indices.numel() > LARGEST:
        return
    axis = scores.shape[-1]
    with no_dispatch():
        set_known(indices, Known((torch.arange(indices.numel()) % axis).view(indices.shape)))
