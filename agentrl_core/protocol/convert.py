"""TensorDicts made for and from batches: construction, column selection, reshaping, conversion."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_non_tensor

from agentrl_core.api.errors import ProtocolError
from agentrl_core.protocol.containers import ObjectArray, copy_containers, object_array
from agentrl_core.protocol.rows import take_rows

Parts = tuple[Any, dict[str, ObjectArray]]


def own_tensordict(td: Any, columns: Mapping[str, ObjectArray]) -> Any:
    """A TensorDict of its own with the tensors of ``td``; one without tensors and rows takes those of ``columns``."""
    if not isinstance(td, TensorDictBase):
        raise ProtocolError(f"batch is a {type(td).__name__}, it must be a TensorDict: use DataProto.from_dict")
    if not td.batch_size and not len(list(td.keys())):
        return TensorDict({}, batch_size=[len(next(iter(columns.values()), ()))], device=td.device)
    return select_columns(td, None)


def select_columns(td: Any, keys: set[str] | None) -> Any:
    """A new TensorDict with the columns ``keys`` (None: all) of ``td``; tensors are shared, TensorDicts are not."""
    columns = {
        key: select_columns(value, None) if _is_tensordict(value) else value
        for key, value in td.items()
        if keys is None or key in keys
    }
    return TensorDict(columns, batch_size=td.batch_size, device=td.device)


def rename_columns(td: Any, names: Mapping[str, str]) -> Any:
    """A new TensorDict whose columns have their new names; the order of the columns is kept."""
    columns = {names.get(key, key): value for key, value in td.items()}
    return TensorDict(columns, batch_size=td.batch_size, device=td.device)


def tensordict_of(tensors: Mapping[str, Any], num_batch_dims: int) -> Any:
    """A TensorDict of tensors that agree in their first ``num_batch_dims`` dimensions. Raises ProtocolError."""
    if num_batch_dims < 1:
        raise ProtocolError(f"from_dict: num_batch_dims is {num_batch_dims}, it must be at least 1")
    first: tuple[str, list[int]] | None = None
    for key, value in tensors.items():
        if not isinstance(value, torch.Tensor | TensorDictBase):
            raise ProtocolError(f"from_dict: tensors[{key!r}] is a {type(value).__name__}: put it into non_tensors")
        if value.dim() < num_batch_dims:
            raise ProtocolError(f"from_dict: {key!r} has {value.dim()} dimensions, not {num_batch_dims} for the batch")
        size = [int(value.size(dim)) for dim in range(num_batch_dims)]
        first = first or (key, size)
        if size != first[1]:
            raise ProtocolError(f"from_dict: {key!r} has batch size {size}, {first[0]!r} has {first[1]}")
    return TensorDict(dict(tensors), batch_size=first[1] if first else [0])


def split_tensordict(td: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Tensors, object columns and single values of a TensorDict with non-tensor data."""
    tensors: dict[str, Any] = {}
    columns: dict[str, Any] = {}
    meta: dict[str, Any] = {}
    for key, value in td.items():
        if isinstance(value, NonTensorStack):
            columns[key] = object_array(key, value.tolist())
        elif is_non_tensor(value):
            zero_rows = isinstance(value.data, _NoRows)
            (columns if zero_rows else meta)[key] = np.empty(0, dtype=object) if zero_rows else value.data
        else:
            tensors[key] = value
    return TensorDict(tensors, batch_size=td.batch_size, device=td.device), columns, meta


class _NoRows:
    """Stands for an object column without rows, of which no stack can be made."""


def joined_tensordict(td: Any, columns: Mapping[str, ObjectArray], meta: Mapping[str, Any], size: int) -> Any:
    """One TensorDict of all three kinds; object columns are stacks, single values non-tensor data."""
    joined = select_columns(td, None) if td is not None else TensorDict({}, batch_size=[size])
    taken = [key for key in (*columns, *meta) if key in joined.keys()] + [key for key in meta if key in columns]
    if taken:
        raise ProtocolError(f"to_tensordict: {taken} would stand for two things: rename one of them first")
    for key, column in columns.items():
        stack = NonTensorStack(*(NonTensorData(item) for item in column))
        joined.set(key, stack if size else NonTensorData(_NoRows(), batch_size=joined.batch_size))
    for key, value in meta.items():
        joined.set(key, NonTensorData(copy_containers(value), batch_size=joined.batch_size))
    return joined


def unfold_columns(td: Any, columns: Mapping[str, ObjectArray], n_split: int, split_keys: set[str]) -> Parts:
    """Every row as ``n_split`` rows: ``split_keys`` cut along dimension 1, all other columns repeated."""
    size = len(next(iter(columns.values()), ())) if td is None else td.batch_size[0]
    index = torch.arange(size).repeat_interleave(n_split)
    present = {*columns, *(td.keys() if td is not None else ())}
    if n_split < 1 or not split_keys <= present:
        raise ProtocolError(
            f"unfold_column_chunks: n_split is {n_split} (at least 1), unknown keys: {sorted(split_keys - present)}"
        )
    parts = {**columns, **({} if td is None else dict(td.items()))}
    for key in sorted(split_keys):
        if td is not None and key in td.keys() and td[key].is_nested:
            raise ProtocolError(f"unfold_column_chunks: {key!r} is a nested tensor, it has no common dimension 1")
        shape = list(parts[key].shape)
        if len(shape) < 2 or shape[1] % n_split:
            raise ProtocolError(
                f"unfold_column_chunks: {key!r} of shape {shape} cannot be cut into {n_split} along dim 1"
            )

    def cut(value: Any) -> Any:
        return value.reshape(size * n_split, value.shape[1] // n_split, *value.shape[2:])

    objects = {
        key: cut(column).copy() if key in split_keys else column.repeat(n_split, axis=0)
        for key, column in columns.items()
    }
    if td is None:
        return None, objects
    unfolded = take_rows(select_columns(td, set(td.keys()) - split_keys), index)
    unfolded.update({key: cut(td[key]) for key in split_keys if key in td.keys()})
    return select_columns(unfolded, None), objects


def reshape_rows(td: Any, columns: Mapping[str, ObjectArray], dims: int, shape: tuple[int, ...] | None) -> Parts:
    """The first ``dims`` dimensions of every column reshaped to ``shape`` (None: to one dimension)."""
    if td is not None and len(td.batch_size) < dims:
        raise ProtocolError(f"the batch has {len(td.batch_size)} batch dimensions, fewer than {dims}")
    for key, column in columns.items():
        if column.ndim < dims:
            raise ProtocolError(
                f"non_tensor_batch[{key!r}] has shape {list(column.shape)}, fewer than {dims} dimensions"
            )
    old = list(td.batch_size[:dims]) if td is not None else list(next(iter(columns.values()), np.empty(0)).shape[:dims])
    new = list(shape) if shape is not None else [int(np.prod(old))]
    objects = {key: column.reshape(*new, *column.shape[dims:]).copy() for key, column in columns.items()}
    return None if td is None else _reshape(td, dims, new), objects


def _reshape(td: Any, dims: int, new: list[int]) -> Any:
    def reshape(column: torch.Tensor) -> torch.Tensor:
        if column.is_nested:
            raise ProtocolError("nested tensors have one batch dimension only: pad them before folding")
        return column.reshape(*new, *column.shape[dims:])

    columns = {key: _reshape(v, dims, new) if _is_tensordict(v) else reshape(v) for key, v in td.items()}
    return TensorDict(columns, batch_size=[*new, *td.batch_size[dims:]], device=td.device)


def _is_tensordict(value: Any) -> bool:
    return isinstance(value, TensorDictBase) and not is_non_tensor(value)
