"""New weights from buckets of bytes into a module, in place."""

import difflib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from agentrl_core.api import ArrayBucket, WeightUpdate
from agentrl_core.api.errors import EngineError


def load_weights(module: torch.nn.Module, update: WeightUpdate) -> None:
    """Copy every tensor of ``update`` into the module's own, cast to its dtype.

    Everything is checked before the first byte is written. Of tied tensors one name is enough; buffers may be absent.

    Raises:
        EngineError: names that the module doesn't have, parameters that are missing, other shapes, unknown dtypes or
            buckets whose bytes don't add up.
    """
    targets = module.state_dict()
    problems = [*_bucket_problems(update), *_name_problems(module, targets, update)]
    if problems:
        raise EngineError("weights refused, nothing was written:\n" + "\n".join(f"  - {line}" for line in problems))
    with torch.no_grad():
        for bucket in update:
            for name, tensor in _tensors(bucket):
                targets[name].copy_(tensor)


def _dtype(name: str) -> torch.dtype | None:
    dtype = getattr(torch, name, None)
    return dtype if isinstance(dtype, torch.dtype) else None


def _bucket_problems(update: WeightUpdate) -> Iterator[str]:
    for number, bucket in enumerate(update):
        counts = len(bucket.names), len(bucket.shapes), len(bucket.dtypes)
        if len(set(counts)) != 1:
            yield f"bucket {number} has {counts[0]} names, {counts[1]} shapes and {counts[2]} dtypes"
            continue
        unknown = sorted({name for name in bucket.dtypes if _dtype(name) is None})
        if unknown:
            yield f"bucket {number} has dtypes that torch doesn't know: {', '.join(unknown)}"
            continue
        expected = sum(
            math.prod(shape) * torch.empty(0, dtype=_dtype(dtype)).element_size()
            for shape, dtype in zip(bucket.shapes, bucket.dtypes, strict=True)
        )
        if expected != bucket.nbytes:
            yield f"bucket {number} holds {bucket.nbytes} bytes; its shapes and dtypes need {expected}"


def _name_problems(module: torch.nn.Module, targets: dict[str, torch.Tensor], update: WeightUpdate) -> Iterator[str]:
    given = {name: tuple(shape) for bucket in update for name, shape in zip(bucket.names, bucket.shapes, strict=False)}
    for name, shape in given.items():
        if name not in targets:
            near = difflib.get_close_matches(name, targets, n=1)
            yield f"{name}: the model has no such tensor" + (f" (nearest: {near[0]})" if near else "")
        elif shape != tuple(targets[name].shape):
            yield f"{name}: shape {list(shape)} was given, the model has {list(targets[name].shape)}"
    aliases: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    for names in aliases.values():
        if not any(name in given for name in names):
            yield f"{' = '.join(names)}: missing"


def _tensors(bucket: ArrayBucket) -> Iterator[tuple[str, torch.Tensor]]:
    data = bucket.data.reshape(-1).view(np.uint8)
    offset = 0
    for name, shape, dtype_name in zip(bucket.names, bucket.shapes, bucket.dtypes, strict=True):
        dtype: Any = _dtype(dtype_name)
        size = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
        # A copy is aligned and writable, which torch asks for and which a slice of shared memory need not be.
        raw = torch.from_numpy(data[offset : offset + size].copy())
        yield name, raw.view(dtype).view(shape)
        offset += size
