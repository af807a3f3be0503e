"""`DataProto`: a batch of rows, with tensors, Python objects and facts about the whole."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Self, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor

from agentrl_core.api.errors import ProtocolError
from agentrl_core.protocol import combine, convert, rows, serialization
from agentrl_core.protocol.containers import ObjectArray, copy_array, copy_containers, object_array

P = ParamSpec("P")
R = TypeVar("R")
Batch = TypeVar("Batch")


def _checked(method: Callable[P, R]) -> Callable[P, R]:
    """Arguments of a wrong type, and values that contain themselves, raise ProtocolError as any other misuse does."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except ProtocolError:
            raise
        except RecursionError as error:
            raise ProtocolError(f"{method.__qualname__}: a value contains itself, or is nested too deeply") from error
        except (AttributeError, TypeError, ValueError) as error:
            raise ProtocolError(f"{method.__qualname__}: unsuitable argument: {error}") from error

    return call


def checked_methods(cls: type[Batch]) -> type[Batch]:
    """The class with `_checked` around its public methods, its constructor and its indexing."""
    for name, member in list(vars(cls).items()):
        if name.startswith("_") and name not in ("__init__", "__getitem__"):
            continue
        if isinstance(member, classmethod):
            setattr(cls, name, classmethod(_checked(member.__func__)))
        elif callable(member):
            setattr(cls, name, _checked(member))
    return cls


@dataclass
class DataProtoItem:
    """One row: tensors without the row dimension, the row's objects, and a copy of the batch's meta_info."""

    batch: Any = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@checked_methods
class DataProto:
    """A batch of rows.

    ``batch`` is a TensorDict whose first dimension is the rows, or None. ``non_tensor_batch`` maps names to numpy
    arrays of dtype object, one entry per row. ``meta_info`` holds facts about the whole batch; `combine` says how two
    of them merge.

    Every operation returns a batch with its own containers: assigning a column, a row of an object column or
    anything in ``meta_info`` never shows in another batch. Tensor storage may be shared (slices, chunks and selections
    of columns are views; of columns that have no padding, as those of a rollout, slices and chunks are copies), and so
    are the objects in the rows: `writable` gives a private copy. ``to``, ``pop``, ``union``, ``rename`` and ``reorder``
    modify the batch itself and return it (``pop``: what was removed). Batches without tensors, without rows, or with
    nothing but meta_info work everywhere.
    """

    def __init__(
        self,
        batch: Any = None,
        non_tensor_batch: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        columns = {key: object_array(key, values) for key, values in (non_tensor_batch or {}).items()}
        self.batch: Any = None if batch is None else convert.own_tensordict(batch, columns)
        self.non_tensor_batch: dict[str, ObjectArray] = columns
        self.meta_info: dict[str, Any] = copy_containers(dict(meta_info or {}))
        self.check_consistency()

    # Construction

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Any] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        num_batch_dims: int = 1,
    ) -> Self:
        """A batch of tensors [rows, …] and of lists or arrays with one entry per row.

        The first ``num_batch_dims`` dimensions of every tensor must agree.
        """
        batch = convert.tensordict_of(tensors, num_batch_dims) if tensors else None
        return cls(batch=batch, non_tensor_batch=non_tensors, meta_info=meta_info)

    @classmethod
    def from_tensordict(
        cls, td: Any, meta_info: Mapping[str, Any] | None = None, num_batch_dims: int | None = None
    ) -> Self:
        """The batch that `to_tensordict` wrote: non-tensor stacks become columns, single values meta_info.

        ``num_batch_dims`` keeps so many of the batch dimensions of ``td``; None: all.
        """
        tensors, columns, meta = convert.split_tensordict(td)
        if num_batch_dims is not None:
            tensors.batch_size = tensors.batch_size[: max(num_batch_dims, 1)]
        return cls(batch=tensors, non_tensor_batch=columns, meta_info={**meta, **(meta_info or {})})

    def to_tensordict(self) -> Any:
        """One TensorDict: object columns as stacks of non-tensor data, meta_info as single non-tensor values."""
        return convert.joined_tensordict(self.batch, self.non_tensor_batch, self.meta_info, len(self))

    def _new(self, batch: Any, columns: Mapping[str, ObjectArray]) -> Self:
        """Another batch of fresh ``batch`` and ``columns``, with a copy of this one's meta_info."""
        return self._of(batch, dict(columns), copy_containers(self.meta_info))

    @classmethod
    def _of(cls, batch: Any, columns: dict[str, ObjectArray], meta_info: dict[str, Any]) -> Self:
        result = cls.__new__(cls)
        result.batch, result.non_tensor_batch, result.meta_info = batch, columns, meta_info
        return result

    # Size and consistency

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return len(next(iter(self.non_tensor_batch.values()), ()))

    def check_consistency(self) -> None:
        """Raises ProtocolError that names the column and both sizes where a column does not fit the batch."""
        if self.batch is not None and not self.batch.batch_size:
            raise ProtocolError("the batch has no row dimension (batch_size []): build it with batch_size=[rows]")
        size = len(self)
        for key, value in self.batch.items() if self.batch is not None else ():
            if is_non_tensor(value):
                raise ProtocolError(f"batch[{key!r}] is not a tensor: put it into non_tensor_batch or meta_info")
            if value.size(0) != size:
                raise ProtocolError(f"batch[{key!r}] has {value.size(0)} rows, the batch has {size}")
        for key, column in self.non_tensor_batch.items():
            if not isinstance(column, np.ndarray) or column.dtype != object:
                # Set by hand.
                self.non_tensor_batch[key] = column = object_array(key, column)
            if len(column) != size:
                raise ProtocolError(f"non_tensor_batch[{key!r}] has {len(column)} rows, the batch has {size}")

    def get_data_info(self) -> str:
        """A table of all columns with dtype and shape, and of the keys of meta_info."""
        lines = [f"{type(self).__name__} with {len(self)} rows"]
        for key, value in self.batch.items() if self.batch is not None else ():
            lines.append(f"  batch[{key!r}]: {_described(value)}")
        for key, column in self.non_tensor_batch.items():
            kinds = sorted({type(item).__name__ for item in column.reshape(-1)})
            lines.append(f"  non_tensor_batch[{key!r}]: {list(column.shape)} of {', '.join(kinds) or 'nothing'}")
        lines += [f"  meta_info[{key!r}]: {type(value).__name__}" for key, value in self.meta_info.items()]
        return "\n".join(lines)

    def nbytes(self) -> int:
        """The bytes of all tensors (of views: what they show, not what they keep alive)."""
        return 0 if self.batch is None else serialization.nbytes(self.batch)

    def __repr__(self) -> str:
        return self.get_data_info()

    # Rows

    def __iter__(self) -> Iterator[DataProtoItem]:
        return (self._item(row) for row in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        """An int gives a `DataProtoItem`; a slice, list, array or tensor of ints or booleans gives a batch."""
        if isinstance(index, int | np.integer) and not isinstance(index, bool):
            return self._item(int(index))
        return self._take(rows.row_index(index, len(self)))

    def _item(self, row: int) -> DataProtoItem:
        size = len(self)
        if not -size <= row < size:
            raise ProtocolError(f"row {row} is out of range: the batch has {size} rows")
        return DataProtoItem(
            batch=None if self.batch is None else self.batch[row],
            non_tensor_batch={key: column[row] for key, column in self.non_tensor_batch.items()},
            meta_info=copy_containers(self.meta_info),
        )

    def _take(self, index: rows.RowIndex) -> Self:
        selector = index if isinstance(index, slice) else index.numpy()
        return self._new(
            None if self.batch is None else rows.take_rows(self.batch, index),
            {key: _own_rows(column[selector]) for key, column in self.non_tensor_batch.items()},
        )

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Rows ``start`` to ``end``; tensors are views where ``step`` is positive and the column has padding."""
        return self._take(slice(start, end, step))

    def select_idxs(self, idxs: Any) -> Self:
        """The rows of a list, array or tensor of ints (repeats allowed, negative from the end) or booleans."""
        return self._take(rows.row_index(idxs, len(self)))

    def reorder(self, indices: Any) -> Self:
        """Brings the rows into this order. Modifies self and returns it. Raises unless it is a permutation."""
        index = rows.row_index(indices, len(self))
        order = range(len(self))[index] if isinstance(index, slice) else index.tolist()
        if sorted(order) != list(range(len(self))):
            raise ProtocolError(
                f"reorder: {len(order)} indices for {len(self)} rows are not each row once: use select_idxs to choose"
            )
        return self._become(self._take(index))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Every row ``repeat_times`` times: a a b b with ``interleave``, a b a b without."""
        if repeat_times < 0:
            raise ProtocolError(f"repeat: repeat_times is {repeat_times}, it must not be negative")
        order = torch.arange(len(self))
        index = order.repeat_interleave(repeat_times) if interleave else order.repeat(repeat_times)
        return self._new(
            None if self.batch is None else rows.repeat_rows(self.batch, index, repeat_times, interleave),
            {key: column[index.numpy()] for key, column in self.non_tensor_batch.items()},
        )

    def chunk(self, chunks: int) -> list[Self]:
        """Exactly ``chunks`` batches of consecutive rows.

        Lengths differ by at most one, the longer chunks first; with fewer rows than chunks the last ones have no rows.
        """
        if chunks < 1:
            raise ProtocolError(f"chunk: chunks is {chunks}, it must be at least 1")
        base, longer = divmod(len(self), chunks)
        ends = [number * base + min(number, longer) for number in range(chunks + 1)]
        return [self.slice(start, end) for start, end in zip(ends, ends[1:], strict=False)]

    def split(self, split_size: int) -> list[Self]:
        """Batches of ``split_size`` consecutive rows, the last one perhaps shorter. No rows: one empty batch."""
        if split_size < 1:
            raise ProtocolError(f"split: split_size is {split_size}, it must be at least 1")
        return [self.slice(start, start + split_size) for start in range(0, max(len(self), 1), split_size)]

    # Columns

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """The named columns and entries; None takes all of that kind. Raises ProtocolError on an unknown name.

        With ``deepcopy`` tensors are copied too, as by `writable`.
        """
        self._check_keys("select", batch_keys, non_tensor_batch_keys, meta_info_keys)
        keys = None if batch_keys is None else set(batch_keys)
        batch = None if self.batch is None else convert.select_columns(self.batch, keys)
        objects = self.non_tensor_batch if non_tensor_batch_keys is None else non_tensor_batch_keys
        meta = self.meta_info if meta_info_keys is None else meta_info_keys
        selected = self._of(
            batch,
            {key: self.non_tensor_batch[key].copy() for key in objects},
            {key: copy_containers(self.meta_info[key]) for key in meta},
        )
        return selected.writable() if deepcopy else selected

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> Self:
        """Removes the named columns and entries (None: none of that kind) from self and returns them as a batch."""
        self._check_keys("pop", batch_keys, non_tensor_batch_keys, meta_info_keys)
        popped = self.select(batch_keys or (), non_tensor_batch_keys or (), meta_info_keys or ())
        for key in batch_keys or ():
            del self.batch[key]
        for key in non_tensor_batch_keys or ():
            del self.non_tensor_batch[key]
        for key in meta_info_keys or ():
            del self.meta_info[key]
        return popped

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Self:
        """Renames columns of either kind. Modifies self and returns it."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        present = {*(self.batch.keys() if self.batch is not None else ()), *self.non_tensor_batch}
        if len(old) != len(new) or len(set(old)) != len(old) or len(set(new)) != len(new):
            raise ProtocolError(f"rename: {old} to {new}: as many new names as old ones, each once")
        if absent := [key for key in old if key not in present]:
            raise ProtocolError(f"rename: {absent} not in the batch; it has {sorted(present)}")
        if taken := [key for key in new if key in present - set(old)]:
            raise ProtocolError(f"rename: {taken} already in the batch: drop those columns first")
        names = dict(zip(old, new, strict=True))
        if self.batch is not None:
            columns = {names.get(key, key): value for key, value in self.batch.items()}
            self.batch = TensorDict(columns, batch_size=self.batch.batch_size, device=self.batch.device)
        self.non_tensor_batch = {names.get(key, key): column for key, column in self.non_tensor_batch.items()}
        return self

    def _check_keys(self, operation: str, *wanted: Iterable[str] | None) -> None:
        present = (() if self.batch is None else self.batch.keys(), self.non_tensor_batch.keys(), self.meta_info.keys())
        for name, keys, known in zip(("batch", "non_tensor_batch", "meta_info"), wanted, present, strict=True):
            if isinstance(keys, str):
                raise ProtocolError(f"{operation}: {name}_keys is the string {keys!r}: give a list of names")
            if absent := [key for key in keys or () if key not in known]:
                raise ProtocolError(
                    f"{operation}: {name} has no {', '.join(map(repr, absent))}; it has {sorted(known)}"
                )

    # Combination

    def union(self, other: "DataProto") -> Self:
        """Takes over the columns and meta_info of ``other``. Modifies self and returns it.

        Both must have the same number of rows, and what both have must be equal (NaN equals NaN); ``metrics`` and
        ``timing`` merge as by `concat`. Raises ProtocolError, before any change, that names what differs.
        """
        for part in (self, other):
            part.check_consistency()
        pair = [part for part in (self, other) if part.batch is not None or part.non_tensor_batch]
        if len(pair) == 2 and len(self) != len(other):
            raise ProtocolError(f"union: the batches have {len(self)} and {len(other)} rows")
        if self.batch is not None and other.batch is not None:
            combine.check_union("batch", dict(self.batch.items()), dict(other.batch.items()))
        combine.check_union("non_tensor_batch", self.non_tensor_batch, other.non_tensor_batch)
        self.meta_info = combine.merge_meta_info([self.meta_info, other.meta_info])
        if self.batch is None:
            self.batch = None if other.batch is None else convert.select_columns(other.batch, None)
        elif other.batch is not None:
            self.batch.update({key: value for key, value in other.batch.items() if key not in self.batch.keys()})
        for key, column in other.non_tensor_batch.items():
            self.non_tensor_batch.setdefault(key, column.copy())
        return self

    @classmethod
    def concat(cls, data: Sequence["DataProto"]) -> Self:
        """The rows of all batches in order.

        All must have the same columns, except that batches without rows may lack some. ``metrics`` of meta_info are
        collected in lists, of ``timing`` the slowest counts, everything else must be equal where present.
        """
        if not data:
            raise ProtocolError("concat: no batch was given")
        filled = [part for part in data if len(part)] or list(data[:1])
        tensors = [part.batch for part in filled if part.batch is not None]
        if tensors and len(tensors) != len(filled):
            lacking = next(number for number, part in enumerate(filled) if part.batch is None)
            raise ProtocolError(f"concat: part {lacking} has no tensors, others have {sorted(tensors[0].keys())}")
        return cls._of(
            rows.cat_rows(tensors) if tensors else None,
            combine.cat_objects([part.non_tensor_batch for part in filled]),
            combine.merge_meta_info([part.meta_info for part in data]),
        )

    # Where the data lives

    def to(self, device: torch.device | str) -> Self:
        """Moves the tensors to ``device``. Modifies self and returns it."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    def __copy__(self) -> Self:
        return self.slice()

    def writable(self) -> Self:
        """A private copy: neither tensors nor containers inside the rows are shared with this batch."""
        return self._new(
            None if self.batch is None else self.batch.clone(),
            {key: copy_array(column) for key, column in self.non_tensor_batch.items()},
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = (serialization.encode(self.batch, protocol), self.non_tensor_batch, self.meta_info)
        # Naming a class costs Ray's pickler as much as a small tensor: only a subclass needs it.
        return _unpickle, state if type(self) is DataProto else (*state, type(self))

    def _become(self, other: Self) -> Self:
        self.batch, self.non_tensor_batch, self.meta_info = other.batch, other.non_tensor_batch, other.meta_info
        return self


def _unpickle(
    encoded: Any, columns: dict[str, ObjectArray], meta: dict[str, Any], cls: type[DataProto] = DataProto
) -> DataProto:
    return cls._of(serialization.decode(encoded), columns, meta)


def _own_rows(column: ObjectArray) -> ObjectArray:
    # Slicing gives a view, every other selection its own array already.
    return column if column.base is None else column.copy()


def _described(value: Any) -> str:
    if isinstance(value, TensorDictBase):
        return f"TensorDict of {', '.join(map(str, value.keys()))}"
    return f"{serialization.dtype_name(value)} {'jagged' if value.is_nested else list(value.shape)}"
