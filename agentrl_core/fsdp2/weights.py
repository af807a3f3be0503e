"""A model's weights on their way out: to engines, and to the files of `model_files`.

They leave in the form that checkpoints have, whose names and shapes differ from the model's own where transformers
fuses tensors as it loads them (the experts of a mixture-of-experts model, for one). They are cast to the data type of
the engines before anything is gathered or copied. Where the model is sharded, a bucket is gathered when it is asked
for: all ranks must step through together, and rank 0 keeps what is gathered. Next to its shards rank 0 holds one bucket
and one layer at most, and other ranks one layer. Into a file on one host each rank writes its own shards instead.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from agentrl_core.api.errors import EngineError
from agentrl_core.api.training_backend import described
from agentrl_core.api.weights import ArrayBucket
from agentrl_core.engine_kit.memory_files import WeightFile, writable_views
from agentrl_core.fsdp2.adapters import adapted_layers, base_name, merged

Tensors = dict[str, Tensor]
_LAYER = re.compile(r"^.*?\.\d+\.")


class ModelWeights:
    """All weights of a model, tied ones once, under the first of their names; those of a LoRA adapter merged into them.

    A bucket holds at most ``bucket_bytes``, or one tensor; of a model whose form differs from its checkpoint's, or one
    layer, because only whole layers can be converted.

    Args:
        model: its parameters keep their names, shapes and dtypes; new ones in their places are noticed.
        dtype: of the weights that leave, except for those that transformers keeps in float32 in a model of that dtype;
            None: as they are stored.
        tensors: gives its weights by name, in place of those that the model has now.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype | None = None,
        tensors: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> None:
        self._model = model
        self._tensors = tensors or functools.partial(model.state_dict, keep_vars=True)
        self._adapted = adapted_layers(model)
        self._dtype = dtype
        # As transformers matches them when it loads a model in that dtype.
        kept = model._get_dtype_plan(dtype) if dtype is not None and isinstance(model, PreTrainedModel) else {}
        self._kept = re.compile("|".join(name.replace("*", r".*") for name in kept)) if kept else None
        # Where the weights are for engines on this host: a file that every update overwrites.
        self._file: WeightFile | None = None
        self._targets: Tensors = {}
        # Whether all ranks see that file; None before the first update.
        self._is_shared: bool | None = None
        own = _without_data(dict(self._own()))
        form = in_checkpoint_form(model, own)
        self._differs = {name: t.shape for name, t in form.items()} != {name: t.shape for name, t in own.items()}

    def _own(self) -> Iterator[tuple[str, Tensor]]:
        # By identity: ranks without a part of a small tensor would find all of those at the same address.
        seen: set[int] = set()
        for own, tensor in self._tensors().items():
            name = base_name(own) if self._adapted else own
            if name is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor.detach()

    def _whole(self, name: str, tensor: Tensor) -> Tensor:
        """With what the adapter adds to it."""
        return merged(tensor, self._adapted[name]) if name in self._adapted and not tensor.is_meta else tensor

    @property
    def is_sharded(self) -> bool:
        """Several ranks hold parts of them."""
        return _is_sharded(dict(self._own()))

    def _dtype_of(self, name: str, tensor: Tensor) -> torch.dtype:
        """In which this tensor leaves."""
        if self._dtype is None or not tensor.is_floating_point():
            return tensor.dtype
        return torch.float32 if self._kept is not None and self._kept.search(name) else self._dtype

    def _cast(self, tensors: Tensors) -> Tensors:
        return {name: self._whole(name, tensor).to(self._dtype_of(name, tensor)) for name, tensor in tensors.items()}

    def _plan(self, bucket_bytes: int) -> list[list[Tensors]]:
        """The model's own tensors or shards, cut by the size of the whole tensors as they leave. A bucket is a list of
        what is converted together."""
        buckets: list[list[Tensors]] = []
        size = 0
        for _, unit in groupby(self._own(), lambda item: self._unit_of(item[0])):
            tensors = dict(unit)
            nbytes = sum(tensor.numel() * self._dtype_of(name, tensor).itemsize for name, tensor in tensors.items())
            if not buckets or size + nbytes > bucket_bytes:
                buckets.append([])
                size = 0
            buckets[-1].append(tensors)
            size += nbytes
        return buckets

    def _unit_of(self, name: str) -> str:
        layer = _LAYER.match(name) if self._differs else None
        return layer[0] if layer else name

    def _converted(self, tensors: Tensors) -> Tensors:
        return in_checkpoint_form(self._model, tensors) if self._differs else tensors

    def layout(self, bucket_bytes: int) -> list[ArrayBucket]:
        """What :meth:`buckets` yields, without the data; nothing is gathered."""
        return [
            described(_joined(self._converted(self._cast(_without_data(unit))) for unit in bucket))
            for bucket in self._plan(bucket_bytes)
        ]

    def buckets(self, bucket_bytes: int, on_host: bool = True, everywhere: bool = False) -> Iterator[Tensors]:
        """The tensors, gathered bucket by bucket; where the model is sharded all ranks must exhaust the iterator.

        Args:
            on_host: move them to the host; otherwise they stay on the model's device.
            everywhere: every rank gets them; otherwise buckets of the other ranks are empty where the model is sharded.
        """
        for bucket in self._plan(bucket_bytes):
            keeps = everywhere or not any(map(_is_sharded, bucket)) or dist.get_rank() == 0
            # Nothing here refers to a bucket while its user has it: the next one is made when it is gone.
            yield _joined(self._gathered(unit, on_host, keeps) for unit in bucket)

    def _gathered(self, unit: Tensors, on_host: bool, keeps: bool) -> Tensors:
        """What is converted together, whole and in the form of the checkpoint; empty unless this rank ``keeps`` it."""
        found: Tensors = {}
        for name, tensor in unit.items():
            (cast,) = self._cast({name: tensor}).values()
            whole = cast.full_tensor() if isinstance(cast, DTensor) else cast
            if keeps:
                found[name] = whole.cpu() if on_host else whole
        return self._converted(found)

    def write_file(self) -> tuple[str, ...]:
        """Write all tensors to one safetensors file in this host's memory, the same one each time; its path.

        Where the model is sharded all ranks must call this. Each writes its own shards, straight into the file, if all
        are on this host and the tensors have the form of the checkpoint; else rank 0 writes what it gathers.
        """
        own = dict(self._own())
        if not _is_sharded(own):
            self._open_file()
            if self._differs:
                self._write_gathered()
            else:
                self._write_own(own)
        elif self._shares_file(own):
            self._write_own(own)
            # Rank 0 speaks for all of them.
            dist.all_reduce(torch.zeros(()))
        else:
            self._write_gathered()
        return (self._file.path,) if self._file is not None else ()

    def _open_file(self) -> None:
        """Make the file, once."""
        if self._file is None:
            layout = self.layout(0)
            self._file = WeightFile(layout)
            self._targets = _targets(layout, self._file.views)

    def _shares_file(self, own: Tensors) -> bool:
        """Whether every rank can write into rank 0's file; opens it on the first call."""
        if self._is_shared is None:
            if dist.get_rank() == 0:
                self._open_file()
            told = [self._file.path if self._file is not None else None]
            dist.broadcast_object_list(told, src=0)
            views = self._file.views if self._file is not None else writable_views(str(told[0]))
            can = not self._differs and views is not None and all(map(_is_split_by_rows, own.values()))
            failed = torch.tensor(not can, dtype=torch.int64)
            dist.all_reduce(failed, dist.ReduceOp.MAX)
            self._is_shared = not failed
            if self._is_shared and views is not None:
                self._targets = _targets(self.layout(0), views)
        return self._is_shared

    def _write_gathered(self) -> None:
        """Tensor by tensor, so that nothing is gathered into a bucket only to be copied again."""
        for tensors in self.buckets(0):
            for name, tensor in tensors.items():
                self._targets[name].copy_(tensor)

    def _write_own(self, own: Tensors) -> None:
        targets, sources = [], []
        is_writer = not dist.is_initialized() or dist.get_rank() == 0
        for name, tensor in own.items():
            target = self._targets.get(name)
            if target is None or (tensor.shape, self._dtype_of(name, tensor)) != (target.shape, target.dtype):
                raise EngineError(f"weights: {name} {list(tensor.shape)} {tensor.dtype} is not the first update's")
            if isinstance(tensor, DTensor):
                rows = -(-tensor.shape[0] // tensor.device_mesh.size())
                start = rows * tensor.device_mesh.get_local_rank()
                target = target[start : start + rows]
            if name in self._adapted:
                # Not with the others: a copy of all of them would be a second model.
                whole = self._whole(name, tensor)
                if is_writer or isinstance(whole, DTensor):
                    target.copy_(whole.to_local() if isinstance(whole, DTensor) else whole)
            elif isinstance(tensor, DTensor):
                sources.append(tensor.to_local())
                targets.append(target)
            elif is_writer:
                sources.append(tensor)
                targets.append(target)
        # One fused copy: for a small model, naming each tensor costs many times its bytes.
        torch._foreach_copy_(targets, sources)

    def close(self) -> None:
        """Remove the file. A second call does nothing."""
        self._targets = {}
        if self._file is not None:
            self._file.close()


def _joined(parts: Iterable[Tensors]) -> Tensors:
    return {name: tensor for part in parts for name, tensor in part.items()}


def _is_sharded(tensors: Tensors) -> bool:
    return any(isinstance(tensor, DTensor) for tensor in tensors.values())


def _is_split_by_rows(tensor: Tensor) -> bool:
    """As ``torch.chunk`` cuts the first dimension, which is what FSDP2 does; or not at all."""
    return not isinstance(tensor, DTensor) or (tensor.device_mesh.ndim == 1 and tensor.placements == (Shard(0),))


def _targets(layout: list[ArrayBucket], views: Mapping[str, Any]) -> Tensors:
    return {
        name: torch.from_numpy(views[name]).view(getattr(torch, dtype)).reshape(shape)
        for bucket in layout
        for name, shape, dtype in zip(bucket.names, bucket.shapes, bucket.dtypes, strict=True)
    }


def in_checkpoint_form(model: Any, tensors: Tensors) -> Tensors:
    """A model's tensors under the names and in the shapes of its files."""
    return dict(revert_weight_conversion(model, tensors)) if isinstance(model, PreTrainedModel) else tensors


def _without_data(tensors: Tensors) -> Tensors:
    return {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in tensors.items()}
