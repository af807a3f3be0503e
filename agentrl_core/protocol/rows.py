"""Rows of a TensorDict: choosing, repeating and concatenating them.

tensordict indexes and concatenates jagged columns: those that share their offsets (and so can be added or multiplied)
still share them afterwards. Ours are dense columns, where its ways are slower, strided nested ones, and the errors.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from agentrl_core.api.errors import ProtocolError
from agentrl_core.protocol.ragged import LARGE_BYTES, RaggedColumn, concatenated, ragged

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


def counts(mask_BW: torch.Tensor) -> torch.Tensor:
    """[B] int64: how many values of each row are not 0, of a mask of bool or int8. torch takes ten times as long."""
    if (column := ragged(mask_BW)) is not None:
        return torch.from_numpy(column.rows.counts(column.flat))
    mask = mask_BW.numpy().view(np.bool_) if mask_BW.dtype in (torch.bool, torch.int8) else mask_BW.bool().numpy()
    return torch.from_numpy(np.add.reduce(mask, axis=1, dtype=np.int64))


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
    taken: dict[int, RaggedColumn] = {}
    return map_columns(td, lambda column: _take(column, index, taken), rows)


def _take(column: torch.Tensor, index: RowIndex, taken: dict[int, RaggedColumn] | None = None) -> torch.Tensor:
    if (rows := ragged(column)) is not None:
        return rows.take(index if isinstance(index, slice) else index.numpy(), taken)
    if column.layout == torch.jagged:
        chosen: torch.Tensor = _alone(column)[index]["column"]
        return chosen
    if column.is_nested:
        parts = column.unbind()
        few = parts[index] if isinstance(index, slice) else [parts[row] for row in index.tolist()]
        return torch.nested.nested_tensor(list(few), dtype=column.dtype)
    return column[index] if isinstance(index, slice) else column.index_select(0, index.to(column.device))


def _alone(column: torch.Tensor) -> Any:
    """A TensorDict with this column only: torch itself neither indexes nor concatenates jagged tensors."""
    return TensorDict({"column": column}, batch_size=[column.size(0)])


def repeat_rows(td: Any, index: torch.Tensor, times: int, interleave: bool) -> Any:
    """What `take_rows` gives for ``index``, which repeats every row ``times`` times; faster for dense columns."""

    def repeat(column: torch.Tensor) -> torch.Tensor:
        # With one repetition flatten would give a view, which repeated rows must not be: they are for writing.
        if column.is_nested or times < 2 or ragged(column) is not None:
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
    columns, joined = {}, dict[int, RaggedColumn]()
    for key, value in first.items():
        pieces = [part[key] for part in parts]
        is_tensor = not isinstance(value, TensorDictBase)
        columns[key] = _cat(where + key, pieces, joined) if is_tensor else cat_rows(pieces, f"{where}{key}.")
    rows = sum(part.batch_size[0] for part in parts)
    return TensorDict(columns, batch_size=[rows, *first.batch_size[1:]], device=first.device)


def _cat(key: str, pieces: list[Any], joined: dict[int, RaggedColumn]) -> torch.Tensor:
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
    if (column := concatenated(pieces, joined)) is not None:
        return column
    pieces = [piece.padded() if isinstance(piece, RaggedColumn) else piece for piece in pieces]
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
