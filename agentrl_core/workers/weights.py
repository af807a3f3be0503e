"""A model's weights on their way out: to engines, and to Hugging Face files.

Both walk over buckets. Where the model is sharded, a bucket is gathered when it is asked for: all ranks must step
through together, rank 0 keeps what is gathered, and no rank holds more than one bucket beside its shards.
"""

import json
from collections.abc import Iterator
from operator import is_
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from agentrl_core.api.weights import ArrayBucket
from agentrl_core.engine_kit.weight_buffer import WeightBuffer
from agentrl_core.engine_kit.weight_group import WeightGroup
from agentrl_core.workers.models import quiet_progress
from agentrl_core.workers.weight_files import WeightFiles

Named = list[tuple[str, Tensor]]
FILE_BYTES = 4 << 30
"""Of one safetensors file; a model that is larger gets several and an index."""
_DTYPE_PREFIX = "torch."


def iter_weight_buckets(model: nn.Module, bucket_bytes: int) -> Iterator[ArrayBucket]:
    """All weights as raw bytes on the host, in order, under the names of ``model.state_dict()``.

    Tied weights come once, under the first of their names. A bucket holds at most ``bucket_bytes``, or one tensor;
    a single tensor that is on the host already is not copied. Where the model is sharded every rank must exhaust the
    iterator; those other than 0 get the same buckets without ``data``.
    """
    for bucket in plan_buckets(model, bucket_bytes):
        gathered = gather(bucket)
        raw = [tensor.contiguous().reshape(-1).view(torch.uint8).numpy() for _, tensor in gathered]
        yield _described(bucket, raw[0] if len(raw) == 1 else np.concatenate(raw) if raw else np.empty(0, np.uint8))


def _described(bucket: Named, data: "np.ndarray[Any, Any]") -> ArrayBucket:
    return ArrayBucket(
        names=tuple(name for name, _ in bucket),
        shapes=tuple(tuple(tensor.shape) for _, tensor in bucket),
        dtypes=tuple(str(tensor.dtype).removeprefix(_DTYPE_PREFIX) for _, tensor in bucket),
        data=data,
    )


def bucket_layout(model: nn.Module, bucket_bytes: int) -> list[ArrayBucket]:
    """What :func:`iter_weight_buckets` yields, without the data; nothing is gathered."""
    return [_described(bucket, np.empty(0, np.uint8)) for bucket in plan_buckets(model, bucket_bytes)]


def send_weights(model: nn.Module, bucket_bytes: int, group: WeightGroup | WeightBuffer | None, on_host: bool) -> None:
    """Send all weights, bucket by bucket, in the order of :func:`bucket_layout`.

    Where the model is sharded every rank must call this; those that have no group only help to gather.

    Args:
        on_host: the group takes tensors on the host (gloo), otherwise those on the model's device.
    """
    for bucket in plan_buckets(model, bucket_bytes):
        gathered = gather(bucket, on_host, everywhere=group is not None)
        if group is not None:
            group.broadcast(torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for _, tensor in gathered]))


def plan_buckets(model: nn.Module, bucket_bytes: int) -> list[Named]:
    """The model's own tensors or shards, tied ones once, cut by the size of the whole tensors."""
    buckets: list[Named] = []
    size = 0
    for name, tensor in _untied(model):
        if not buckets or size + _nbytes(tensor) > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append((name, tensor))
        size += _nbytes(tensor)
    return buckets


def gather(bucket: Named, on_host: bool = True, everywhere: bool = False) -> Named:
    """The whole tensors of a bucket, on the host unless told otherwise; unless ``everywhere`` on rank 0 alone."""
    gathered: Named = []
    is_sharded = False
    for name, tensor in bucket:
        whole = tensor.detach()
        if isinstance(whole, DTensor):
            is_sharded = True
            whole = whole.full_tensor()
        if everywhere or not is_sharded or dist.get_rank() == 0:
            gathered.append((name, whole.cpu() if on_host else whole))
    return gathered


class ModelFiles:
    """A model's weights in the files of :class:`WeightFiles`, which every call of :meth:`write` overwrites.

    Where the model is not sharded, the second update and later ones are one fused copy of all tensors: for a small
    model naming each of them costs many times its bytes.

    Args:
        model: its parameters keep their names, shapes and dtypes; new ones in their places are noticed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._files = WeightFiles(sum(_nbytes(tensor) for _, tensor in _untied(model)))
        self._paths: tuple[str, ...] = ()
        self._sources: list[Tensor] = []
        self._targets: list[Tensor] = []

    def write(self) -> tuple[str, ...]:
        """Paths of the files; see :meth:`WeightFiles.write`. Where the model is sharded, the other ranks must exhaust
        :func:`iter_weight_buckets` meanwhile."""
        sources = [tensor for _, tensor in _untied(self._model)]
        if self._targets and len(sources) == len(self._sources) and all(map(is_, sources, self._sources)):
            with torch.no_grad():
                torch._foreach_copy_(self._targets, sources)
            return self._paths
        # Tensor by tensor, so that nothing is gathered into a bucket first only to be copied once more.
        self._paths = self._files.write(iter_weight_buckets(self._model, 0))
        self._sources, self._targets = sources, self._targets_of(sources)
        return self._paths

    def _targets_of(self, sources: list[Tensor]) -> list[Tensor]:
        """Where each tensor lies in the files; empty where these hold something else than the tensors themselves."""
        places = self._files.places()
        # Weights that transformers converts as it loads them are written in the checkpoint's form, under its names.
        if any(isinstance(source, DTensor) for source in sources) or list(places) != [
            name for name, _ in _untied(self._model)
        ]:
            return []
        targets = [
            torch.from_numpy(data).view(getattr(torch, dtype)).reshape(shape) for shape, dtype, data in places.values()
        ]
        same = all(
            target.dtype == source.dtype and torch.equal(target, source.detach().cpu())
            for target, source in zip(targets, sources, strict=True)
        )
        return targets if same else []

    def close(self) -> None:
        """Remove the files."""
        self._sources, self._targets = [], []
        self._files.close()


def _untied(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    # By identity: ranks without a part of a small tensor would find all of those at the same address.
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def save_model(model: Any, path: str, file_bytes: int = FILE_BYTES) -> None:
    """Config and safetensors in Hugging Face layout, in the weights' own dtype.

    Where the model is sharded all ranks must call this; rank 0 writes one file after the other.
    """
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        with quiet_progress():
            model.save_pretrained(path)
        return
    is_first = dist.get_rank() == 0
    if is_first:
        Path(path).mkdir(parents=True, exist_ok=True)
        _save_configs(model, path)
    buckets = plan_buckets(model, file_bytes)
    files = {}
    for number, bucket in enumerate(buckets, 1):
        gathered = gather(bucket)
        if is_first:
            file = "model.safetensors" if len(buckets) == 1 else f"model-{number:05d}-of-{len(buckets):05d}.safetensors"
            # What transformers fuses when it loads a model, experts for one, has other names and shapes in files.
            tensors = {
                name: whole.contiguous() for name, whole in revert_weight_conversion(model, dict(gathered)).items()
            }
            save_file(tensors, Path(path) / file, metadata={"format": "pt"})
            files.update(dict.fromkeys(tensors, file))
    if is_first and len(buckets) > 1:
        total = sum(_nbytes(tensor) for bucket in buckets for _, tensor in bucket)
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (Path(path) / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _save_configs(model: Any, path: str) -> None:
    model.config.save_pretrained(path)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(path)
