"""Columns that are kept without padding: the values of their rows, one row after the other.

To everybody a :class:`RaggedColumn` is a tensor [B, W]. An operation on it sees it padded, for as long as the operation
takes. A view of it, or a write into it, keeps it padded for good, so that nothing that is written is lost. Choosing,
copying, concatenating and sending rows needs no padding.

Shapes: B rows, W places of a row, N values of all rows.
"""

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

Array = np.ndarray[Any, Any]
# From here on numpy asks for huge pages.
LARGE_BYTES = 4 * 2**20
BLOCK = 2**20
"""Values that are looked at together."""
aten = torch.ops.aten


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


def zeros(shape: tuple[int, ...], dtype: Any) -> Array:
    """Zeros that take memory only where they are written to. numpy asks for huge pages, which are filled whole."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < LARGE_BYTES:
        return np.zeros(shape, dtype)
    return np.frombuffer(mmap.mmap(-1, size), dtype).reshape(shape)


@dataclass(frozen=True, eq=False)
class Rows:
    """Where the values of rows stand: row ``b`` has ``lengths_B[b]`` of ``width`` places, from ``first_B[b]`` on."""

    lengths_B: Array
    width: int
    first_B: Array

    @classmethod
    def of(cls, lengths_B: Array, width: int, first_B: Array | None = None) -> "Rows":
        """Rows that begin in the first place, where nothing else is said."""
        return cls(lengths_B, width, np.zeros(len(lengths_B), dtype=np.int64) if first_B is None else first_B)

    @cached_property
    def ends_B(self) -> Array:
        """Where each row ends among all values."""
        return self.lengths_B.cumsum(dtype=np.int64)

    @cached_property
    def starts_B(self) -> Array:
        """Where each row begins among all values."""
        return self.ends_B - self.lengths_B

    @property
    def size(self) -> int:
        """Number of values."""
        return int(self.ends_B[-1]) if len(self.ends_B) else 0

    def equals(self, other: "Rows") -> bool:
        """Whether values of one stand where those of the other do."""
        if self is other:
            return True
        pairs = (self.lengths_B, other.lengths_B), (self.first_B, other.first_B)
        return self.width == other.width and all(np.array_equal(*pair) for pair in pairs)

    def take(self, index: Any) -> "Rows":
        """Some of the rows."""
        return Rows(self.lengths_B[index], self.width, self.first_B[index])

    def padded(self, values: Array, fill: float) -> Array:
        """[B, W]"""
        return padded(values, self.lengths_B, fill, self.width, self.first_B)

    def values_of(self, column_BW: Array) -> Array:
        """The values that a padded column has in these places."""
        parts = zip(column_BW, self.first_B.tolist(), (self.first_B + self.lengths_B).tolist(), strict=True)
        return np.concatenate([row_W[first:end] for row_W, first, end in parts] or [column_BW.reshape(-1)[:0]])

    def counts(self, values: Array) -> Array:
        """[B] int64: how many values of each row are not 0."""
        return np.array([np.count_nonzero(values[part]) for part in self.slices], dtype=np.int64)

    @property
    def slices(self) -> list[slice]:
        """Where each row is among all values."""
        return [slice(*ends) for ends in zip(self.starts_B.tolist(), self.ends_B.tolist(), strict=True)]


class Source:
    """What says the values of a column."""

    dtype: "np.dtype[Any]"
    derived = ""
    """Says the source where values follow from lengths alone: see :func:`source_of`."""

    def values(self, rows: Rows) -> Array:
        """[N]"""
        raise NotImplementedError(f"{type(self).__name__} must say its values")

    def padded(self, rows: Rows, fill: float) -> Array:
        """[B, W], ``fill`` where no value is."""
        return rows.padded(self.values(rows), fill)

    def take(self, rows: Rows, index: Any) -> "Source":
        """Of some of the rows."""
        raise NotImplementedError(f"{type(self).__name__} must know its rows")


class Values(Source):
    """The values themselves.

    Args:
        array: has them.
        starts_B: where each row begins in it; None: the rows are all of it, one after the other.
    """

    def __init__(self, array: Array, starts_B: Array | None = None) -> None:
        self._array, self._starts_B, self.dtype = array, starts_B, array.dtype

    def values(self, rows: Rows) -> Array:
        if self._starts_B is None:
            return self._array
        ends_B = self._starts_B + rows.lengths_B
        if len(ends_B) and (self._starts_B[1:] == ends_B[:-1]).all():
            return self._array[self._starts_B[0] : ends_B[-1]]
        return _joined(self._array, self._starts_B, ends_B)

    def take(self, rows: Rows, index: Any) -> Source:
        return Values(self._array, (rows.starts_B if self._starts_B is None else self._starts_B)[index])

    def cut(self, rows: Rows, skipped_B: Array) -> Source:
        """Without the first values of each row."""
        return Values(self._array, (rows.starts_B if self._starts_B is None else self._starts_B) + skipped_B)


class Runs(Source):
    """Values of which each stands several times in succession, in one row."""

    def __init__(self, values: Any, counts: Any, dtype: Any) -> None:
        self._runs, self._counts = np.array(values, dtype=dtype), np.array(counts, dtype=np.int64)
        self.dtype = self._runs.dtype

    def values(self, rows: Rows) -> Array:
        return np.repeat(self._runs, self._counts)

    def take(self, rows: Rows, index: Any) -> Source:
        ends = self._counts.cumsum()
        # No run goes on in another row.
        first_B, last_B = ends.searchsorted(rows.starts_B[index], "right"), ends.searchsorted(rows.ends_B[index])
        kept = _ranges(first_B, np.where(rows.lengths_B[index] > 0, last_B + 1, first_B))
        return Runs(self._runs[kept], self._counts[kept], self.dtype)


class Few(Source):
    """Zeros, and something else in few places."""

    def __init__(self, places: Array, values: Array) -> None:
        order = places.argsort()
        self._places, self._few, self.dtype = places[order], values[order], values.dtype

    def values(self, rows: Rows) -> Array:
        values = np.zeros(rows.size, dtype=self.dtype)
        values[self._places] = self._few
        return values

    def take(self, rows: Rows, index: Any) -> Source:
        starts_B = rows.starts_B[index]
        first_B, end_B = self._places.searchsorted(starts_B), self._places.searchsorted(rows.ends_B[index])
        kept = _ranges(first_B, end_B)
        moved_B = rows.take(index).starts_B - starts_B
        return Few(self._places[kept] + np.repeat(moved_B, end_B - first_B), self._few[kept])


class Filled(Source):
    """1 where a value is: a mask."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)
        self.derived = self.dtype.name

    def values(self, rows: Rows) -> Array:
        return np.ones(rows.size, dtype=self.dtype)

    def padded(self, rows: Rows, fill: float) -> Array:
        order_BW = np.arange(rows.width, dtype=np.int32) - rows.first_B.astype(np.int32)[:, None]
        filled_BW = (order_BW >= 0) & (order_BW < rows.lengths_B.astype(np.int32)[:, None])
        return filled_BW.astype(self.dtype) if self.dtype.itemsize > 1 else filled_BW.view(self.dtype)

    def take(self, rows: Rows, index: Any) -> Source:
        return self


class Order(Source):
    """The place of each value in its row, from 0; before and behind a row those of its first and its last value."""

    dtype = np.dtype(np.int32)
    derived = "order"

    def values(self, rows: Rows) -> Array:
        return np.arange(rows.size, dtype=np.int32) - np.repeat(rows.starts_B.astype(np.int32), rows.lengths_B)

    def padded(self, rows: Rows, fill: float) -> Array:
        order_BW = np.arange(rows.width, dtype=np.int32) - rows.first_B.astype(np.int32)[:, None]
        last_B1 = np.maximum(rows.lengths_B.astype(np.int32)[:, None] - 1, 0)
        return np.clip(order_BW, 0, last_B1, out=order_BW)

    def take(self, rows: Rows, index: Any) -> Source:
        return self


def source_of(derived: str) -> Source:
    """The source that says so of itself: :class:`Order`, or :class:`Filled` of a type."""
    return Order() if derived == Order.derived else Filled(derived)


class RaggedColumn(Tensor):
    """A column [B, W] without padding.

    Args:
        source: of its values.
        rows: where they stand.
        fill: what stands elsewhere.
        part_of: the column of which it is the places from ``begins`` on, with that column's source: what is written
            into one of them is written into the other.
    """

    rows: Rows
    fill: float
    source: Source
    begins: int | None
    whole: "RaggedColumn | None"
    _kept: Tensor | None

    @staticmethod
    def __new__(
        cls, source: Source, rows: Rows, fill: float = 0, part_of: "RaggedColumn | None" = None, begins: int = 0
    ) -> "RaggedColumn":
        dtype = torch.from_numpy(np.empty(0, dtype=source.dtype)).dtype
        shape = len(rows.lengths_B), rows.width
        # Those of the padded tensor: torch asks whether it can look at it in another shape.
        strides = None if part_of is None else part_of.stride()
        column: RaggedColumn = torch.Tensor._make_wrapper_subclass(cls, shape, strides, dtype=dtype)
        column.source, column.rows, column.fill = source, rows, fill
        column.whole, column.begins, column._kept = part_of, None if part_of is None else begins, None
        return column

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def part(self, begins: int, width: int) -> "RaggedColumn":
        """The places from ``begins`` on, as a column that shares this one's values."""
        first_B = np.clip(self.rows.first_B - begins, 0, width)
        ends_B = np.clip(self.rows.first_B + self.rows.lengths_B - begins, 0, width)
        rows = Rows(np.maximum(ends_B - first_B, 0), width, first_B)
        source = self.source
        if isinstance(source, Values):
            source = source.cut(self.rows, np.clip(begins - self.rows.first_B, 0, self.rows.lengths_B))
        return RaggedColumn(source, rows, self.fill, self, begins)

    @property
    def is_ragged(self) -> bool:
        """Nobody has made it a padded tensor for good."""
        return self._kept is None and (self.whole is None or self.whole.is_ragged)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of its values."""
        if not self.is_ragged:
            return self.kept().nbytes
        return 0 if self.source.derived else self.rows.size * self.source.dtype.itemsize

    @property
    def flat(self) -> Array:
        """[N] its values; not to be written to."""
        if not self.is_ragged:
            return self.rows.values_of(self.kept().numpy())
        if self.whole is None or isinstance(self.source, Values):
            return self.source.values(self.rows)
        rows = self.whole.rows
        skipped_B = np.maximum((self.begins or 0) - rows.first_B, 0)
        starts_B = rows.starts_B + skipped_B
        return _joined(self.whole.flat, starts_B, starts_B + self.rows.lengths_B)

    def padded(self) -> Tensor:
        """[B, W], which may be thrown away; not to be written to."""
        if not self.is_ragged:
            return self.kept()
        if self.whole is None:
            return torch.from_numpy(self.source.padded(self.rows, self.fill))
        if self.source.derived:
            begins = self.begins or 0
            return self.whole.padded()[:, begins : begins + self.rows.width]
        return torch.from_numpy(self.rows.padded(self.flat, self.fill))

    def kept(self) -> Tensor:
        """[B, W], from now on the column itself."""
        if self._kept is None:
            if self.whole is None:
                self._kept = self.padded()
            else:
                begins = self.begins or 0
                self._kept = self.whole.kept()[:, begins : begins + self.rows.width]
        return self._kept

    def like(self, values: Array) -> "RaggedColumn":
        """Another column with values in the same places, and 0 elsewhere."""
        return RaggedColumn(Values(values), self.rows)

    def take(self, index: Any, taken: "dict[int, RaggedColumn] | None" = None) -> "RaggedColumn":
        """Some of the rows.

        Args:
            index: a slice, or numbers of rows.
            taken: what was taken of other columns, by their ids: parts stay parts of one column.
        """
        taken = {} if taken is None else taken
        if id(self) not in taken:
            if self.whole is None:
                chosen = RaggedColumn(self.source.take(self.rows, index), self.rows.take(index), self.fill)
            else:
                chosen = self.whole.take(index, taken).part(self.begins or 0, self.rows.width)
            taken[id(self)] = chosen
        return taken[id(self)]

    def copied(self) -> Tensor:
        """A column of its own."""
        if not self.is_ragged:
            return self.kept().clone()
        derived = self.source.derived and self.whole is None
        return RaggedColumn(self.source if derived else Values(self.flat.copy()), self.rows, self.fill)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first = args[0] if args else None
        if isinstance(first, RaggedColumn) and first.is_ragged:
            if (chosen := _chosen(func, args)) is not None:
                return first.take(chosen)
            if func is aten.clone.default:
                return first.copied()
        keeps = func.is_view or func._schema.is_mutable

        def plain(column: RaggedColumn) -> Tensor:
            return column.kept() if keeps else column.padded()

        return func(*tree_map_only(RaggedColumn, plain, args), **tree_map_only(RaggedColumn, plain, kwargs or {}))

    # What torch does without asking __torch_dispatch__.

    def numpy(self, *, force: bool = False) -> Array:
        found: Array = self.kept().numpy(force=force)
        return found

    def data_ptr(self) -> int:
        return self.kept().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.kept().untyped_storage()

    def __dlpack__(self, **options: Any) -> Any:
        return self.kept().__dlpack__(**options)

    def tolist(self) -> Any:
        return self.padded().tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.kept().numpy(), dtype=dtype, copy=copy)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.copied()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.padded())

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain: Any = self.padded().clone()
        return plain.__reduce_ex__(protocol)


def ragged(column: Any) -> RaggedColumn | None:
    """The column, if it has no padding."""
    return column if isinstance(column, RaggedColumn) and column.is_ragged else None


def together(*columns: Any) -> list[RaggedColumn] | None:
    """The columns, if none has padding and their values stand in the same places."""
    found = [each for column in columns if (each := ragged(column)) is not None]
    same = len(found) == len(columns) and all(found[0].rows.equals(each.rows) for each in found[1:])
    return found if same else None


def values_in(column_BW: Tensor, rows: Rows) -> Array:
    """[N] the values that a column has in these places."""
    column = ragged(column_BW)
    if column is not None and column.rows.equals(rows):
        return column.flat
    plain = column_BW.detach().cpu()
    # Which numpy does not know.
    return rows.values_of((plain.float() if plain.dtype == torch.bfloat16 else plain).numpy())


def like(column_BW: Tensor, other_BW: Tensor) -> Tensor:
    """The other column without padding, if the first one has none: what it has between rows becomes 0."""
    column = ragged(column_BW)
    if column is None or column.shape != other_BW.shape or other_BW.dtype == torch.bfloat16:
        return other_BW
    return other_BW if together(column, other_BW) else column.like(values_in(other_BW, column.rows))


def on_values(function: Callable[..., Tensor], *columns_BW: Tensor) -> Tensor:
    """What a function makes of columns that computes each value from those in the same place."""
    columns = together(*columns_BW)
    if columns is None:
        return function(*columns_BW)
    return columns[0].like(function(*(torch.from_numpy(column.flat) for column in columns)).numpy())


def converted(column_BW: Tensor, dtype: torch.dtype) -> Tensor:
    """A column in another type."""
    column = ragged(column_BW)
    if column is None or column.dtype == dtype:
        return column_BW.to(dtype)
    name = str(dtype).removeprefix("torch.")
    source = Filled(name) if isinstance(column.source, Filled) else Values(column.flat.astype(name))
    return RaggedColumn(source, column.rows, column.fill)


def under(mask_BW: Tensor, *columns_BW: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
    """[N] of each column the values where the mask is not 0, row by row; in another type, if one is given."""
    if columns := together(mask_BW, *columns_BW):
        mask = columns[0].flat.astype(np.bool_, copy=False)
        return [_under(mask, column.flat, dtype or column.dtype) for column in columns[1:]]
    return [column_BW[mask_BW.bool()].to(dtype or column_BW.dtype) for column_BW in columns_BW]


def _under(mask: Array, values: Array, dtype: torch.dtype) -> Tensor:
    chosen_N, end = torch.empty(int(np.count_nonzero(mask)), dtype=dtype), 0
    # In blocks: numpy needs eight bytes for each value that a mask chooses.
    for start in range(0, len(mask), BLOCK):
        block = slice(start, start + BLOCK)
        part = torch.from_numpy(values[block][mask[block]])
        chosen_N[end : end + len(part)] = part
        end += len(part)
    return chosen_N


def concatenated(pieces: Sequence[Any], joined: dict[int, RaggedColumn]) -> RaggedColumn | None:
    """One column of the rows of all pieces in order; None where one is padded, or they differ in their padding.

    Args:
        joined: as ``taken`` of :meth:`RaggedColumn.take`, by the ids of first pieces.
    """
    first = pieces[0]
    if not all(isinstance(piece, RaggedColumn) and piece.is_ragged for piece in pieces):
        return None
    if len({(piece.fill, piece.rows.width, piece.begins, piece.source.derived) for piece in pieces}) > 1:
        return None
    if id(first) not in joined:
        if first.whole is not None:
            whole = concatenated([piece.whole for piece in pieces], joined)
            if whole is None:
                return None
            joined[id(first)] = whole.part(first.begins, first.rows.width)
        else:
            lengths_B = np.concatenate([piece.rows.lengths_B for piece in pieces])
            first_B = np.concatenate([piece.rows.first_B for piece in pieces])
            same = bool(first.source.derived)
            source = first.source if same else Values(np.concatenate([piece.flat for piece in pieces]))
            joined[id(first)] = RaggedColumn(source, Rows(lengths_B, first.rows.width, first_B), first.fill)
    return joined[id(first)]


def _chosen(func: Any, args: tuple[Any, ...]) -> Array | None:
    """The numbers of the rows that an operation chooses; None: it is another one, or an error that torch reports."""
    index: Any = None
    if func is aten.index_select.default and args[1] in (0, -2):
        index = args[2]
    elif func is aten.index.Tensor and len(args[1]) == 1:
        index = args[1][0]
    # To torch uint8 is a mask too.
    if not isinstance(index, Tensor) or index.dim() != 1 or index.dtype == torch.uint8:
        return None
    size = len(args[0].rows.lengths_B)
    if index.dtype == torch.bool:
        return np.flatnonzero(index.numpy()) if len(index) == size else None
    numbers = index.numpy().astype(np.int64)
    least = -size if func is aten.index.Tensor else 0
    if numbers.min(initial=0) < least or numbers.max(initial=-1) >= size:
        return None
    return np.where(numbers < 0, numbers + size, numbers)


def _ranges(starts_B: Array, ends_B: Array) -> Array:
    """The numbers from each start up to its end."""
    ranges = [np.arange(*ends) for ends in zip(starts_B.tolist(), ends_B.tolist(), strict=True)]
    return np.concatenate(ranges or [np.arange(0)])


def _joined(values: Array, starts_B: Array, ends_B: Array) -> Array:
    parts = zip(starts_B.tolist(), ends_B.tolist(), strict=True)
    return np.concatenate([values[start:end] for start, end in parts] or [values[:0]])
