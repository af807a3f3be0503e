"""Makes the TensorDicts of batches: of tensors, of other TensorDicts and with other columns."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_non_tensor

from agentrl_core.api.errors import ProtocolError
from agentrl_core.protocol.containers import ObjectArray, copy_containers, object_array


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


def _is_tensordict(value: Any) -> bool:
    return isinstance(value, TensorDictBase) and not is_non_tensor(value)
