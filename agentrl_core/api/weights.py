"""New weights on their way to an engine: raw bytes under Hugging Face names, in buckets.

Nothing here needs torch or safetensors: an engine may live in an interpreter with another version of either.

    async def update_weights(self, update, version):
        for bucket in update:
            for name, shape, dtype, array in bucket.tensors():  # array: uint8, C-contiguous bytes of one tensor
                ...
"""

import functools
import json
import math
import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from agentrl_core.api.errors import EngineError

if TYPE_CHECKING:
    import numpy as np

Running = Literal["recompute", "continue"]
"""What becomes of requests that run while an engine takes new weights, see :class:`WeightUpdate`."""

DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}
"""Bytes of one element of the dtypes that weights may have, by their torch names."""

SAFETENSORS_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""Names of the safetensors format, and those of torch."""


def _no_data() -> "np.ndarray[Any, Any]":
    import numpy as np

    return np.empty(0, np.uint8)


@dataclass(frozen=True)
class ArrayBucket:
    """A bucket of weights as raw bytes: the tensors stand in ``data`` one after the other, each C-contiguous.

    Args:
        names: Hugging Face names.
        shapes: of each tensor.
        dtypes: torch names without the prefix (``bfloat16``, ``float32``).
        data: [bytes] uint8; may be read-only. Empty where the bucket only describes what is sent.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    data: "np.ndarray[Any, Any]" = field(default_factory=_no_data)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each tensor."""
        return [math.prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.sizes)

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], str, "np.ndarray[Any, Any]"]]:
        """Name, shape, dtype and bytes (uint8, a view) of each tensor."""
        start = 0
        for name, shape, dtype, size in zip(self.names, self.shapes, self.dtypes, self.sizes, strict=True):
            yield name, shape, dtype, self.data[start : start + size]
            start += size


@dataclass(frozen=True)
class Broadcast:
    """Weights that the actor sends while the engine's ``update_weights`` runs, from its own devices to the engine's.

    The processes of engines join with :func:`agentrl_core.engine_kit.weight_group.join_as_engine`, and receive.

    Args:
        address: where they meet; the same one as before means the same group, which is joined once.
        backend: ``gloo``, ``nccl``, or ``ipc`` where each computes on a device of the actor's.
        size: ranks of the group. The actor's come first: rank 0, with ``ipc`` one for each of its processes.
        first_rank: of this engine's processes, which have as many ranks as the engine has devices.
        buckets: in the order in which they are sent; their ``data`` is empty.
    """

    address: str
    backend: str
    size: int
    first_rank: int
    buckets: tuple[ArrayBucket, ...]


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter (arXiv 2106.09685), as PEFT saves it; the weights below it stay as they are.

    Args:
        name: by which requests ask for it (``SamplingParams.adapter``).
        config: what ``adapter_config.json`` says: ``r``, ``lora_alpha``, ``target_modules`` and the rest.
    """

    name: str
    config: Mapping[str, Any]


@dataclass(frozen=True)
class WeightUpdate:
    """A model's new weights, by one of four transports.

    Iterating yields buckets whatever the transport is; those of ``broadcast`` have names, shapes and dtypes only, and
    ``shared`` has none.

    Args:
        buckets: all tensors, tied weights once, under the first of their names.
        files: the same in safetensors files on this host, held in memory where the host can: an engine with its own
            worker processes passes the paths on, and they map the files. They hold still until
            ``update_weights`` returns, and are overwritten later.
        shared: the engine generates with the actor's module itself, so nothing moves; only caches are reset and the
            version is taken over.
        broadcast: nothing lies anywhere yet. Only for engines with the capability ``broadcast``.
        running: what becomes of requests that run while the weights change. ``recompute``: their KV cache is computed
            again with the new weights. ``continue``: they keep the cache that the old weights computed; only for
            engines with the capability ``old_cache``. In both modes requests that come later find nothing cached.
            Requests that run while an adapter's new version comes end with the version with which they began.
        adapter: the tensors are a new version of this adapter, under PEFT's names
            (``base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight``); only for engines with the capability
            ``adapters``. None: they are the model's own.
    """

    buckets: Sequence[ArrayBucket] = ()
    files: tuple[str, ...] = ()
    shared: bool = False
    broadcast: Broadcast | None = None
    running: Running = "recompute"
    adapter: Adapter | None = None

    def __iter__(self) -> Iterator[ArrayBucket]:
        yield from self.buckets
        if self.broadcast is not None:
            yield from self.broadcast.buckets
        for path in self.files:
            yield map_safetensors(path)


def map_safetensors(path: str) -> ArrayBucket:
    """A safetensors file as one bucket whose ``data`` maps the file read-only, without a copy.

    Raises:
        EngineError: the file is not there, or is not safetensors.
    """
    import numpy as np

    try:
        # Not numpy.memmap: each slice of it costs as much as the copy of a small tensor.
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        (length,) = struct.unpack_from("<Q", mapped)
        names, shapes, dtypes = _layout(mapped[8 : 8 + length].rstrip())
        return ArrayBucket(names, shapes, dtypes, data=np.frombuffer(mapped, np.uint8)[8 + length :])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise EngineError(f"weights in {path} cannot be read as safetensors: {error!r}") from error


@functools.lru_cache(maxsize=32)
def _layout(header: bytes) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """Names, shapes and dtypes in the order of the data; update after update brings the same header."""
    tensors: dict[str, Any] = json.loads(header)
    tensors.pop("__metadata__", None)
    entries = sorted(tensors.items(), key=lambda item: int(item[1]["data_offsets"][0]))
    return (
        tuple(name for name, _ in entries),
        tuple(tuple(entry["shape"]) for _, entry in entries),
        tuple(SAFETENSORS_DTYPES[entry["dtype"]] for _, entry in entries),
    )
