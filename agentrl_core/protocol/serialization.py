"""Pickling: tensors travel as buffers, which pickle protocol 5 keeps out of band.

Ray's object store then holds a batch without an extra copy, and readers map it without one. What a reader maps is
shared memory: it is read-only by contract, `DataProto.writable` gives a private copy.

The encoded form is made of tuples and buffers only, since every object of a class of its own costs Ray's pickler more
than a small tensor does:

    tensor       ("dense", buffer, dtype's name, shape)
    nested       ("jagged", values, offsets, jagged dimension) or ("nested", rows, dtype's name)
    TensorDict   ("td", {key: encoded}, batch size)
"""

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor

from agentrl_core.api.errors import ProtocolError
from agentrl_core.protocol.rows import jagged, jagged_parts

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Encoded = tuple[Any, ...]

# Up to this size a copy inside the pickle is cheaper than a buffer beside it.
SMALL_BYTES = 1024
OUT_OF_BAND_PROTOCOL = 5


def encode(td: Any, protocol: int = OUT_OF_BAND_PROTOCOL) -> Encoded | None:
    """A picklable form of a TensorDict; device tensors are copied to the CPU. Raises ProtocolError on non-tensors."""
    # Columns that share their offsets share the encoded ones too: pickle keeps that identity.
    return None if td is None else _Encoder(protocol).tensordict(td)


def decode(encoded: Encoded | None) -> Any:
    """The TensorDict of `encode`, on the CPU; its tensors use the buffers as they are."""
    return None if encoded is None else _decode_tensordict(encoded, {})


def dense_parts(td: Any) -> Iterator[torch.Tensor]:
    """The dense tensors that hold the data of all columns."""
    for value in td.values():
        if isinstance(value, TensorDictBase):
            yield from dense_parts(value)
        elif value.is_nested:
            yield from jagged_parts(value)[:2] if value.layout == torch.jagged else value.unbind()
        else:
            yield value


class _Encoder:
    def __init__(self, protocol: int) -> None:
        self._out_of_band = protocol >= OUT_OF_BAND_PROTOCOL
        self._offsets: dict[int, tuple[torch.Tensor, Encoded]] = {}

    def tensordict(self, td: Any) -> Encoded:
        columns = {}
        for key, value in td.items():
            if is_non_tensor(value):
                raise ProtocolError(f"batch[{key!r}] is not a tensor: put it into non_tensor_batch or meta_info")
            columns[key] = self.tensordict(value) if isinstance(value, TensorDictBase) else self.column(value)
        return ("td", columns, tuple(td.batch_size))

    def column(self, column: Any) -> Encoded:
        if not column.is_nested:
            return self.dense(column)
        if column.layout != torch.jagged:
            return ("nested", tuple(map(self.dense, column.unbind())), _name(column.dtype))
        values, offsets, dim = jagged_parts(column)
        if id(offsets) not in self._offsets:
            # The tensor is kept too: a freed one could pass its id on.
            self._offsets[id(offsets)] = (offsets, self.dense(offsets))
        return ("jagged", self.dense(values), self._offsets[id(offsets)][1], dim)

    def dense(self, tensor: torch.Tensor) -> Encoded:
        whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        # A single entry counts as contiguous whatever its stride; view needs a stride of 1.
        flat = whole.as_strided((whole.numel(),), (1,))
        data: Any = flat.view(torch.uint8).numpy()
        in_band = data.nbytes <= SMALL_BYTES or not self._out_of_band
        buffer = bytearray(data) if in_band else pickle.PickleBuffer(data)
        return ("dense", buffer, _name(tensor.dtype), tuple(tensor.shape))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _decode_tensordict(encoded: Encoded, seen: dict[int, torch.Tensor]) -> Any:
    _, columns, batch_size = encoded
    return TensorDict({key: _decode(value, seen) for key, value in columns.items()}, batch_size=batch_size)


def _decode(encoded: Encoded, seen: dict[int, torch.Tensor]) -> Any:
    match encoded:
        case ("td", *_):
            return _decode_tensordict(encoded, seen)
        case ("jagged", values, offsets, dim):
            if id(offsets) not in seen:
                seen[id(offsets)] = _decode_dense(offsets)
            return jagged(_decode_dense(values), seen[id(offsets)], dim)
        case ("nested", rows, dtype):
            return torch.nested.nested_tensor(list(map(_decode_dense, rows)), dtype=getattr(torch, dtype))
    return _decode_dense(encoded)


class _Mapped:
    """Shows read-only memory to numpy as writable, and keeps it alive.

    torch has no read-only tensors and warns about such memory once per process; that it must not be written to is
    this module's contract.
    """

    def __init__(self, data: Bytes) -> None:
        self._data = data
        self.__array_interface__ = {**data.__array_interface__, "data": (data.ctypes.data, False)}


def _decode_dense(encoded: Encoded) -> torch.Tensor:
    _, buffer, name, shape = encoded
    dtype: torch.dtype = getattr(torch, name)
    if type(buffer) is bytearray:
        return torch.frombuffer(buffer, dtype=dtype).reshape(shape) if buffer else torch.empty(shape, dtype=dtype)
    data: Bytes = np.frombuffer(buffer, dtype=np.uint8)
    if not data.flags.writeable:
        data = np.asarray(_Mapped(data))
    if data.ctypes.data % dtype.itemsize:
        data = data.copy()
    return torch.from_numpy(data).view(dtype).reshape(shape)
