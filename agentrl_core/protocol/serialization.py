"""Pickling: tensors travel as numpy buffers, which pickle protocol 5 keeps out of band.

Ray's object store then holds a batch without an extra copy, and readers map it without one. What a reader maps is
shared memory: it is read-only by contract, `DataProto.writable` gives a private copy.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor

from agentrl_core.api.errors import ProtocolError
from agentrl_core.protocol.rows import jagged, jagged_parts

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class EncodedTensor:
    """A dense tensor: its bytes, dtype and shape."""

    data: Bytes
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EncodedNested:
    """A nested tensor: jagged as values and offsets, strided as its rows."""

    parts: tuple[EncodedTensor, ...]
    dtype: torch.dtype
    is_jagged: bool


@dataclass(frozen=True, slots=True)
class EncodedTensorDict:
    """A TensorDict: its columns and batch size."""

    columns: dict[str, Any]
    batch_size: tuple[int, ...]


def encode(td: Any) -> EncodedTensorDict | None:
    """A picklable form of a TensorDict; device tensors are copied to the CPU. Raises ProtocolError on non-tensors."""
    # Columns that share their offsets share the encoded ones too: pickle keeps that identity.
    return None if td is None else _encode_tensordict(td, {})


def decode(encoded: EncodedTensorDict | None) -> Any:
    """The TensorDict of `encode`, on the CPU; its tensors use the buffers as they are."""
    return None if encoded is None else _decode_tensordict(encoded, {})


def dense_parts(td: Any) -> Iterator[torch.Tensor]:
    """The dense tensors that hold the data of all columns."""
    for value in td.values():
        if isinstance(value, TensorDictBase):
            yield from dense_parts(value)
        elif value.is_nested:
            yield from jagged_parts(value) if value.layout == torch.jagged else value.unbind()
        else:
            yield value


def _encode_tensordict(td: Any, seen: dict[int, EncodedTensor]) -> EncodedTensorDict:
    columns = {}
    for key, value in td.items():
        if is_non_tensor(value):
            raise ProtocolError(f"batch[{key!r}] is not a tensor: put it into non_tensor_batch or meta_info")
        is_td = isinstance(value, TensorDictBase)
        columns[key] = _encode_tensordict(value, seen) if is_td else _encode_column(value, seen)
    return EncodedTensorDict(columns, tuple(td.batch_size))


def _encode_column(column: Any, seen: dict[int, EncodedTensor]) -> EncodedTensor | EncodedNested:
    if not column.is_nested:
        return _encode_tensor(column)
    if column.layout != torch.jagged:
        return EncodedNested(tuple(map(_encode_tensor, column.unbind())), column.dtype, False)
    values, offsets = jagged_parts(column)
    if column.lengths() is None:
        encoded = seen.setdefault(id(offsets), _encode_tensor(offsets))
    else:
        encoded = _encode_tensor(offsets)
    return EncodedNested((_encode_tensor(values), encoded), column.dtype, True)


def _encode_tensor(tensor: torch.Tensor) -> EncodedTensor:
    shape = tuple(tensor.shape)
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return EncodedTensor(flat.view(torch.uint8).numpy(), tensor.dtype, shape)


def _decode_tensordict(encoded: EncodedTensorDict, seen: dict[int, torch.Tensor]) -> Any:
    columns = {
        key: _decode_tensordict(value, seen) if isinstance(value, EncodedTensorDict) else _decode_column(value, seen)
        for key, value in encoded.columns.items()
    }
    return TensorDict(columns, batch_size=encoded.batch_size)


def _decode_column(encoded: EncodedTensor | EncodedNested, seen: dict[int, torch.Tensor]) -> torch.Tensor:
    if isinstance(encoded, EncodedTensor):
        return _decode_tensor(encoded)
    if not encoded.is_jagged:
        return torch.nested.nested_tensor(list(map(_decode_tensor, encoded.parts)), dtype=encoded.dtype)
    values, offsets = encoded.parts
    if id(offsets) not in seen:
        seen[id(offsets)] = _decode_tensor(offsets)
    return jagged(_decode_tensor(values), seen[id(offsets)])


class _Mapped:
    """Shows read-only memory to numpy as writable, and keeps it alive.

    torch has no read-only tensors and warns about such memory once per process; that it must not be written to is
    this module's contract.
    """

    def __init__(self, data: Bytes) -> None:
        self._data = data
        self.__array_interface__ = {**data.__array_interface__, "data": (data.ctypes.data, False)}


def _decode_tensor(encoded: EncodedTensor) -> torch.Tensor:
    if encoded.data.size == 0:
        return torch.empty(encoded.shape, dtype=encoded.dtype)
    data = encoded.data if encoded.data.flags.writeable else np.asarray(_Mapped(encoded.data))
    if data.ctypes.data % encoded.dtype.itemsize:
        data = data.copy()
    return torch.from_numpy(data).view(encoded.dtype).reshape(encoded.shape)
