"""Rows of a TensorDict: choosing, repeating and concatenating them.

tensordict indexes and concatenates jagged columns: those that share their offsets (and so can be added or multiplied)
still share them afterwards. Ours are dense columns, where its ways are slower, strided nested ones, and the errors.
"""

import math
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from agentrl_core.api.errors import ProtocolError

# From here on numpy asks for huge pages.
LARGE_BYTES = 4 * 2**20
RowIndex = slice | torch.Tensor
Array = np.ndarray[Any, Any]


def row_index(index: Any, size: int) -> RowIndex:
    """A slice, or an int64 tensor of row numbers in 0 … size - 1.

    Takes a slice, or a one-dimensional list, range, array or tensor of ints (negative: from the end) or of ``size``
    booleans. Raises ProtocolError on anything else.
    """
    if isinstance(index, slice):
        return index
    if not isinstance(index, torch.Tensor | np.ndarray | list | tuple | range):
        raise ProtocolError(f"cannot index a batch with a {type(index).__name__}: use an int, slice, list or array")
    array = index.detach().cpu().numpy() if isinstance(index, torch.Tensor) else np.asarray(index)
    if array.ndim != 1:
        raise ProtocolError(f"a row index has one dimension, this one has shape {list(array.shape)}")
    if array.dtype == np.bool_:
        if len(array) != size:
            raise ProtocolError(f"the boolean row index has {len(array)} entries, the batch has {size} rows")
        return torch.from_numpy(np.flatnonzero(array))
    if array.size and array.dtype.kind not in "iu":
        raise ProtocolError(f"row indices are ints or booleans, not {array.dtype}")
    wrong = array[(array < -size) | (array >= size)]
    if wrong.size:
        raise ProtocolError(f"row {int(wrong[0])} is out of range: the batch has {size} rows")
    rows = array.astype(np.int64)
    return torch.from_numpy(np.where(rows < 0, rows + size, rows))


def padded(flat: Array, lengths_B: Array, value: float, width: int | None = None, first_B: Any = 0) -> Array:
    """Rows that stand one after the other, as one array [B, width].

    Args:
        width: None: as wide as the longest row.
        first_B: where each row begins.
    """
    end, width = 0, int(lengths_B.max(initial=0)) if width is None else width
    shape = len(lengths_B), width
    rows = np.full(shape, value, dtype=flat.dtype) if value else zeros(shape, flat.dtype)
    # Row by row: a mask of all places would cost more than all rows do.
    places = zip(lengths_B.tolist(), np.broadcast_to(first_B, len(lengths_B)).tolist(), strict=True)
    for row, (length, first) in enumerate(places):
        start, end = end, end + length
        rows[row, first : first + length] = flat[start:end]
    return rows


def counts(mask_BW: torch.Tensor) -> torch.Tensor:
    """[B] int64: how many values of each row are not 0, of a mask of bool or int8. torch takes ten times as long."""
    mask = mask_BW.numpy().view(np.bool_) if mask_BW.dtype in (torch.bool, torch.int8) else mask_BW.bool().numpy()
    return torch.from_numpy(np.add.reduce(mask, axis=1, dtype=np.int64))


def zeros(shape: tuple[int, ...], dtype: Any) -> Array:
    """Zeros that take memory only where they are written to. numpy asks for huge pages, which are filled whole."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < LARGE_BYTES:
        return np.zeros(shape, dtype)
    return np.frombuffer(mmap.mmap(-1, size), dtype).reshape(shape)


def map_columns(td: Any, function: Callable[[torch.Tensor], torch.Tensor], rows: int) -> Any:
    """A new TensorDict of ``rows`` rows: ``function`` of every column, also in TensorDicts inside."""
    columns = {
        key: map_columns(value, function, rows) if isinstance(value, TensorDictBase) else function(value)
        for key, value in td.items()
    }
    return TensorDict(columns, batch_size=[rows, *td.batch_size[1:]], device=td.device)


def take_rows(td: Any, index: RowIndex) -> Any:
    """The rows that ``index`` names: of a slice views (strided nested columns: copies), of an int64 tensor copies."""
    if isinstance(index, slice):
        numbers = range(*index.indices(td.batch_size[0]))
        rows, index = len(numbers), index if numbers.step > 0 else torch.tensor(numbers, dtype=torch.int64)
    else:
        rows = index.numel()
    return map_columns(td, lambda column: _take(column, index), rows)


def _take(column: torch.Tensor, index: RowIndex) -> torch.Tensor:
    if column.layout == torch.jagged:
        taken: torch.Tensor = _alone(column)[index]["column"]
        return taken
    if column.is_nested:
        parts = column.unbind()
        chosen = parts[index] if isinstance(index, slice) else [parts[row] for row in index.tolist()]
        return torch.nested.nested_tensor(list(chosen), dtype=column.dtype)
    return column[index] if isinstance(index, slice) else column.index_select(0, index.to(column.device))


def _alone(column: torch.Tensor) -> Any:
    """A TensorDict with this column only: torch itself neither indexes nor concatenates jagged tensors."""
    return TensorDict({"column": column}, batch_size=[column.size(0)])


def repeat_rows(td: Any, index: torch.Tensor, times: int, interleave: bool) -> Any:
    """What `take_rows` gives for ``index``, which repeats every row ``times`` times; faster for dense columns."""

    def repeat(column: torch.Tensor) -> torch.Tensor:
        # With one repetition flatten would give a view, which repeated rows must not be: they are for writing.
        if column.is_nested or times < 2:
            return _take(column, index)
        dim = 1 if interleave else 0
        shape = [-1] * (column.dim() + 1)
        shape[dim] = times
        return column.unsqueeze(dim).expand(shape).flatten(0, 1)

    return map_columns(td, repeat, index.numel())


def cat_rows(parts: Sequence[Any], where: str = "") -> Any:
    """One TensorDict with the rows of all ``parts`` in order. Raises ProtocolError where the columns do not fit."""
    first = parts[0]
    for number, part in enumerate(parts[1:], start=1):
        missing = set(first.keys()) ^ set(part.keys())
        if missing:
            names = ", ".join(repr(where + key) for key in sorted(missing))
            raise ProtocolError(f"concat: part {number} and part 0 do not have the same tensors: {names} in one only")
    columns = {}
    for key, value in first.items():
        pieces = [part[key] for part in parts]
        is_tensor = not isinstance(value, TensorDictBase)
        columns[key] = _cat(where + key, pieces) if is_tensor else cat_rows(pieces, f"{where}{key}.")
    rows = sum(part.batch_size[0] for part in parts)
    return TensorDict(columns, batch_size=[rows, *first.batch_size[1:]], device=first.device)


def _cat(key: str, pieces: list[Any]) -> torch.Tensor:
    first = pieces[0]
    for number, piece in enumerate(pieces[1:], start=1):
        if piece.dtype != first.dtype or piece.layout != first.layout or piece.is_nested != first.is_nested:
            raise ProtocolError(
                f"concat: {key!r} is {first.dtype} ({first.layout}) in part 0 "
                f"and {piece.dtype} ({piece.layout}) in part {number}"
            )
        if not first.is_nested and piece.shape[1:] != first.shape[1:]:
            raise ProtocolError(
                f"concat: {key!r} has shape {list(first.shape)} in part 0 and {list(piece.shape)} in part {number}: "
                "all but the first dimension must be equal (pad to one length first)"
            )
    if first.layout == torch.jagged:
        dims = [piece._ragged_idx for piece in pieces]
        if len(set(dims)) > 1:
            raise ProtocolError(f"concat: {key!r} is jagged in the dimensions {dims}: transpose them to the same one")
        together: Any = torch.cat([_alone(piece) for piece in pieces])
        whole: torch.Tensor = together["column"]
        return whole
    if first.is_nested:
        return torch.nested.nested_tensor([row for piece in pieces for row in piece.unbind()], dtype=first.dtype)
    needs_grad = any(piece.requires_grad for piece in pieces)
    out = None if needs_grad else _large(first, [sum(map(len, pieces)), *first.shape[1:]])
    return torch.cat(pieces) if out is None else torch.cat(pieces, out=out)


def _large(like: torch.Tensor, shape: list[int]) -> torch.Tensor | None:
    """Memory for a large CPU tensor, otherwise None.

    numpy asks the kernel for huge pages, torch does not: for 96 MiB the page faults cost more than the copy.
    """
    size = math.prod(shape) * like.itemsize
    if like.device.type != "cpu" or size < LARGE_BYTES:
        return None
    return torch.from_numpy(np.empty(size, dtype=np.uint8)).view(like.dtype).view(shape)
