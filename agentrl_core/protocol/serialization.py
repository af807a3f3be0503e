"""Tensors on their way: a TensorDict as a document of dicts, lists and dense tensors, and how pickle holds those.

    TensorDict   {"batch_size": [rows], "columns": {name: document}}
    dense        {"tensor": dense}
    jagged       {"values": dense, "offsets": dense, "dim": jagged dimension}
    nested       {"rows": [dense, …], "dtype": name}

Files (`storage`) keep each dense tensor under a name, pickles as ``(buffer, dtype's name, shape)``, or a column without
padding as a document of its own: its values and where they stand. Pickle protocol 5
keeps buffers out of band: Ray's object store then holds a batch without an extra copy, and readers map it without one.
What a reader maps is shared memory: it is read-only by contract, `DataProto.writable` gives a private copy. No object
has its own class: each costs Ray's pickler more than a small tensor does.
"""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor

from agentrl_core.api.errors import ProtocolError
from agentrl_core.protocol.ragged import RaggedColumn, Rows, Source, Values, source_of

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Document = dict[str, Any]

# Up to this size a copy inside the pickle is cheaper than a buffer beside it.
SMALL_BYTES = 1024
OUT_OF_BAND_PROTOCOL = 5


def to_document(td: Any, dense: Callable[[torch.Tensor], Any]) -> Document:
    """The document of a TensorDict with ``dense`` of every dense tensor. Raises ProtocolError on non-tensors.

    Columns that share their offsets share those of the document. The tensors are kept until the end: a freed one could
    pass its id on.
    """
    offsets_seen: dict[int, tuple[torch.Tensor, Any]] = {}

    def column(key: str, value: Any) -> Document:
        if is_non_tensor(value):
            raise ProtocolError(f"batch[{key!r}] is not a tensor: put it into non_tensor_batch or meta_info")
        if isinstance(value, TensorDictBase):
            return tensordict(value)
        if not value.is_nested:
            return {"tensor": dense(value)}
        if value.layout != torch.jagged:
            return {"rows": list(map(dense, value.unbind())), "dtype": dtype_name(value)}
        if value.lengths() is not None:
            value = value.contiguous()  # without holes between the rows
        values, offsets, dim = value.values().movedim(value._ragged_idx - 1, 0), value.offsets(), value._ragged_idx
        if id(offsets) not in offsets_seen:
            offsets_seen[id(offsets)] = (offsets, dense(offsets))
        return {"values": dense(values), "offsets": offsets_seen[id(offsets)][1], "dim": dim}

    def tensordict(td: Any) -> Document:
        return {"batch_size": list(td.batch_size), "columns": {key: column(key, value) for key, value in td.items()}}

    return tensordict(td)


def from_document(document: Document, dense: Callable[[Any], torch.Tensor]) -> Any:
    """The TensorDict of a document of `to_document`; ``dense`` makes the tensors again."""
    offsets_seen: dict[int, torch.Tensor] = {}

    def column(document: Document) -> Any:
        match document:
            case {"columns": columns, "batch_size": size}:
                return TensorDict({key: column(value) for key, value in columns.items()}, batch_size=size)
            case {"tensor": tensor}:
                return dense(tensor)
            case {"values": values, "offsets": offsets, "dim": dim}:
                if id(offsets) not in offsets_seen:
                    offsets_seen[id(offsets)] = dense(offsets)
                moved = dense(values).movedim(0, dim - 1)
                return torch.nested.nested_tensor_from_jagged(moved, offsets=offsets_seen[id(offsets)], jagged_dim=dim)
        rows = list(map(dense, document["rows"]))
        return torch.nested.nested_tensor(rows, dtype=getattr(torch, document["dtype"]))

    return column(document)


def nbytes(td: Any) -> int:
    """The bytes of all dense tensors of a TensorDict."""
    sizes: list[int] = []
    to_document(td, lambda tensor: sizes.append(tensor.nbytes))
    return sum(sizes)


def encode(td: Any, protocol: int = OUT_OF_BAND_PROTOCOL) -> Document | None:
    """A picklable form of a TensorDict; device tensors are copied to the CPU. Raises ProtocolError on non-tensors."""
    out_of_band = protocol >= OUT_OF_BAND_PROTOCOL
    seen: dict[int, Any] = {}

    def ragged(column: RaggedColumn) -> Document:
        if column.whole is not None:
            return {"whole": once(column.whole, dense), "begins": column.begins, "width": column.rows.width}
        source = column.source.derived or dense(torch.from_numpy(column.flat))
        return {"source": source, "rows": once(column.rows, places), "fill": column.fill}

    def places(rows: Rows) -> Document:
        lengths, first = (dense(torch.from_numpy(each)) for each in (rows.lengths_B, rows.first_B))
        return {"lengths": lengths, "first": first, "width": rows.width}

    def once(value: Any, encoded: Callable[[Any], Any]) -> Any:
        if id(value) not in seen:
            seen[id(value)] = encoded(value)
        return seen[id(value)]

    def dense(tensor: torch.Tensor) -> Any:
        if isinstance(tensor, RaggedColumn) and tensor.is_ragged:
            return once(tensor, ragged)
        whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        # A single entry counts as contiguous whatever its stride; view needs a stride of 1.
        data: Any = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy()
        in_band = data.nbytes <= SMALL_BYTES or not out_of_band
        return bytearray(data) if in_band else pickle.PickleBuffer(data), dtype_name(tensor), tuple(tensor.shape)

    document = None if td is None else to_document(td, dense)
    # The functions above are a cycle, which would keep what they have seen.
    seen.clear()
    return document


def decode(encoded: Document | None) -> Any:
    """The TensorDict of `encode`, on the CPU; its tensors use the buffers as they are."""
    seen: dict[int, Any] = {}

    def dense(encoded: Any) -> torch.Tensor:
        if not isinstance(encoded, dict):
            return _from_buffer(encoded)
        if id(encoded) not in seen:
            seen[id(encoded)] = ragged(encoded)
        column: torch.Tensor = seen[id(encoded)]
        return column

    def ragged(encoded: Document) -> torch.Tensor:
        if "whole" in encoded:
            whole: Any = dense(encoded["whole"])
            part: torch.Tensor = whole.part(encoded["begins"], encoded["width"])
            return part
        values, rows = encoded["source"], encoded["rows"]
        if id(rows) not in seen:
            lengths, first = (_from_buffer(rows[name]).numpy() for name in ("lengths", "first"))
            seen[id(rows)] = Rows(lengths, rows["width"], first)
        source: Source = source_of(values) if isinstance(values, str) else Values(_from_buffer(values).numpy())
        return RaggedColumn(source, seen[id(rows)], encoded["fill"])

    td = None if encoded is None else from_document(encoded, dense)
    seen.clear()
    return td


def dtype_name(tensor: torch.Tensor) -> str:
    """The name of a tensor's dtype in torch, such as ``float32``."""
    return str(tensor.dtype).removeprefix("torch.")


class _Mapped:
    """Shows read-only memory to numpy as writable, and keeps it alive.

    torch has no read-only tensors and warns about such memory once per process; that it must not be written to is
    this module's contract.
    """

    def __init__(self, data: Bytes) -> None:
        self._data = data
        self.__array_interface__ = {**data.__array_interface__, "data": (data.ctypes.data, False)}


def _from_buffer(encoded: tuple[Any, str, tuple[int, ...]]) -> torch.Tensor:
    buffer, name, shape = encoded
    dtype: torch.dtype = getattr(torch, name)
    if type(buffer) is bytearray:
        return torch.frombuffer(buffer, dtype=dtype).reshape(shape) if buffer else torch.empty(shape, dtype=dtype)
    data: Bytes = np.frombuffer(buffer, dtype=np.uint8)
    if not data.flags.writeable:
        data = np.asarray(_Mapped(data))
    if data.ctypes.data % dtype.itemsize:
        data = data.copy()
    return torch.from_numpy(data).view(dtype).reshape(shape)
