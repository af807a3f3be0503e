"""Row operations on the columns of a TensorDict: dense, jagged and nested tensors, and TensorDicts inside.

Jagged columns that share their offsets (and so can be added or multiplied) still share them afterwards.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from agentrl_core.api.errors import ProtocolError

# From here on numpy asks for huge pages.
LARGE_BYTES = 4 * 2**20
RowIndex = slice | torch.Tensor


class _SharedOffsets:
    """New offsets by the old ones that they come from."""

    def __init__(self) -> None:
        # The old tensors are kept too: a freed one could pass its id on.
        self._known: dict[tuple[int, ...], tuple[list[torch.Tensor], torch.Tensor]] = {}

    def get(self, old: list[torch.Tensor], make: Callable[[], torch.Tensor]) -> torch.Tensor:
        key = tuple(map(id, old))
        if key not in self._known:
            self._known[key] = (old, make())
        return self._known[key][1]


def map_columns(td: Any, function: Callable[[torch.Tensor], torch.Tensor], rows: int) -> Any:
    """A new TensorDict of ``rows`` rows: ``function`` of every column, also in TensorDicts inside."""
    columns = {
        key: map_columns(value, function, rows) if isinstance(value, TensorDictBase) else function(value)
        for key, value in td.items()
    }
    return TensorDict(columns, batch_size=[rows, *td.batch_size[1:]], device=td.device)


def take_rows(td: Any, index: RowIndex) -> Any:
    """The rows that ``index`` names (a slice: dense columns are views; an int64 tensor [rows]: copies)."""
    total = td.batch_size[0]
    rows = len(range(*index.indices(total))) if isinstance(index, slice) else index.numel()
    cache = _SharedOffsets()
    return map_columns(td, lambda column: _take(column, index, cache), rows)


def repeat_rows(td: Any, index: torch.Tensor, times: int, interleave: bool) -> Any:
    """What `take_rows` gives for ``index``, which repeats every row ``times`` times; faster for dense columns."""
    cache = _SharedOffsets()

    def repeat(column: torch.Tensor) -> torch.Tensor:
        # With one repetition flatten would give a view, which repeated rows must not be: they are for writing.
        if column.is_nested or times < 2:
            return _take(column, index, cache)
        dim = 1 if interleave else 0
        shape = [-1] * (column.dim() + 1)
        shape[dim] = times
        return column.unsqueeze(dim).expand(shape).flatten(0, 1)

    return map_columns(td, repeat, index.numel())


def _take(column: torch.Tensor, index: RowIndex, cache: _SharedOffsets) -> torch.Tensor:
    if not column.is_nested:
        if isinstance(index, slice):
            return column[index] if (index.step or 1) > 0 else _take(column, _as_tensor(index, len(column)), cache)
        return column.index_select(0, index.to(column.device))
    index = _as_tensor(index, column.size(0)).to(column.device)
    if column.layout != torch.jagged:
        rows = column.unbind()
        return torch.nested.nested_tensor([rows[row] for row in index.tolist()], dtype=column.dtype)
    values, offsets, dim = jagged_parts(column)
    lengths = offsets.diff()[index]
    new_offsets = cache.get([offsets], lambda: offsets_of(lengths))
    shift = torch.repeat_interleave(offsets[:-1][index] - new_offsets[:-1], lengths)
    return jagged(values[shift + torch.arange(shift.numel(), device=shift.device)], new_offsets, dim)


def _as_tensor(index: RowIndex, rows: int) -> torch.Tensor:
    return torch.tensor(range(*index.indices(rows)), dtype=torch.int64) if isinstance(index, slice) else index


def cat_rows(parts: Sequence[Any], where: str = "") -> Any:
    """One TensorDict with the rows of all ``parts`` in order. Raises ProtocolError where the columns do not fit."""
    first = parts[0]
    for number, part in enumerate(parts[1:], start=1):
        missing = set(first.keys()) ^ set(part.keys())
        if missing:
            names = ", ".join(repr(where + key) for key in sorted(missing))
            raise ProtocolError(f"concat: part {number} and part 0 do not have the same tensors: {names} in one only")
    cache = _SharedOffsets()
    columns = {}
    for key, value in first.items():
        pieces = [part[key] for part in parts]
        if isinstance(value, TensorDictBase):
            columns[key] = cat_rows(pieces, f"{where}{key}.")
        else:
            columns[key] = _cat(where + key, pieces, cache)
    rows = sum(part.batch_size[0] for part in parts)
    return TensorDict(columns, batch_size=[rows, *first.batch_size[1:]], device=first.device)


def _cat(key: str, pieces: list[torch.Tensor], cache: _SharedOffsets) -> torch.Tensor:
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
    if not first.is_nested:
        needs_grad = any(piece.requires_grad for piece in pieces)
        out = None if needs_grad else _large(first, [sum(len(piece) for piece in pieces), *first.shape[1:]])
        return torch.cat(pieces) if out is None else torch.cat(pieces, out=out)
    if first.layout != torch.jagged:
        return torch.nested.nested_tensor([row for piece in pieces for row in piece.unbind()], dtype=first.dtype)
    values, old, dims = zip(*map(jagged_parts, pieces), strict=True)
    if len(set(dims)) > 1:
        raise ProtocolError(f"concat: {key!r} is jagged in the dimensions {list(dims)}: transpose them to the same one")
    offsets = cache.get(list(old), lambda: offsets_of(torch.cat([each.diff() for each in old])))
    return jagged(torch.cat(values), offsets, dims[0])


def _large(like: torch.Tensor, shape: list[int]) -> torch.Tensor | None:
    """Memory for a large CPU tensor, otherwise None.

    numpy asks the kernel for huge pages, torch does not: for 96 MiB the page faults cost more than the copy.
    """
    size = math.prod(shape) * like.itemsize
    if like.device.type != "cpu" or size < LARGE_BYTES:
        return None
    return torch.from_numpy(np.empty(size, dtype=np.uint8)).view(like.dtype).view(shape)


def clone_rows(td: Any) -> Any:
    """A TensorDict that shares no storage with ``td``."""
    cache = _SharedOffsets()

    def clone(column: torch.Tensor) -> torch.Tensor:
        if column.layout != torch.jagged:
            return column.clone(memory_format=torch.preserve_format)
        values, offsets, dim = jagged_parts(column)
        return jagged(values.clone(), cache.get([offsets], offsets.clone), dim)

    return map_columns(td, clone, td.batch_size[0])


def jagged_parts(column: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Values [total, …] and offsets [rows + 1] of a jagged tensor without holes, and its jagged dimension."""
    if column.lengths() is not None:
        column = column.contiguous()
    dim: int = column._ragged_idx
    return column.values().movedim(dim - 1, 0), column.offsets(), dim


def jagged(values: torch.Tensor, offsets: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """The tensor of these parts; ``dim`` is where the first dimension of ``values`` stands in it."""
    return torch.nested.nested_tensor_from_jagged(values.movedim(0, dim - 1), offsets=offsets, jagged_dim=dim)


def offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    """Offsets [rows + 1] of rows with these lengths."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
