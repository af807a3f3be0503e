"""Python values beside the tensors: object columns, private copies of containers, and equality."""

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from agentrl_core.api.errors import ProtocolError

ObjectArray = np.ndarray[Any, np.dtype[np.object_]]


def object_array(key: str, values: Iterable[Any]) -> ObjectArray:
    """A new array of dtype object with one entry per row.

    A list of equally long lists stays a column of lists (numpy would make it two-dimensional). An array keeps its
    shape, its first axis being the rows.
    """
    if isinstance(values, np.ndarray):
        if values.ndim == 0:
            raise ProtocolError(f"non_tensor_batch[{key!r}] has shape (): give one entry per row")
        return values.astype(object)
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise ProtocolError(
            f"non_tensor_batch[{key!r}] is a {type(values).__name__}: give a list or array with one entry per row"
        )
    rows = list(values)
    return np.fromiter(rows, dtype=object, count=len(rows))


def copy_containers(value: Any) -> Any:
    """A copy in which no container is shared with ``value``.

    Dictionaries, lists, tuples, sets, arrays and mutable dataclasses are copied all the way down; other objects, and
    the storage of tensors, are shared.
    """
    kind = type(value)
    if kind is dict:
        return {key: copy_containers(item) for key, item in value.items()}
    if kind is list:
        return [copy_containers(item) for item in value]
    if kind is tuple:
        return tuple(copy_containers(item) for item in value)
    if isinstance(value, np.ndarray):
        return copy_array(value) if value.dtype == object else value.copy()
    is_container = isinstance(value, dict | list | tuple | set | bytearray) or dataclasses.is_dataclass(value)
    return copy.deepcopy(value) if is_container and not isinstance(value, type) else value


def copy_array(array: ObjectArray) -> ObjectArray:
    """A copy of an object array whose rows' containers are copied too."""
    result = np.empty(array.shape, dtype=object)
    for index, item in np.ndenumerate(array):
        result[index] = copy_containers(item)
    return result


def equal(left: Any, right: Any) -> bool:
    """Whether two values are the same all the way down; NaN equals NaN, and a container may contain itself."""
    return _equal(left, right, set())


def _equal(left: Any, right: Any, open_pairs: set[tuple[int, int]]) -> bool:
    """As :func:`equal`; a pair that is being compared already differs nowhere, unless it does elsewhere."""
    if left is right:
        return True
    pair = (id(left), id(right))
    if pair in open_pairs:
        return True
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and _equal_tensors(left, right)
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        if not isinstance(left, np.ndarray) or not isinstance(right, np.ndarray):
            return False
        if left.shape != right.shape or left.dtype != right.dtype:
            return False
        if left.dtype != object:
            return np.array_equal(left, right, equal_nan=left.dtype.kind in "fc")
        return _equal_items(left.reshape(-1), right.reshape(-1), pair, open_pairs)
    if isinstance(left, TensorDictBase) and isinstance(right, TensorDictBase):
        # A TensorDict is a Mapping that iterates over its rows.
        return _equal(dict(left.items()), dict(right.items()), open_pairs)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and _equal_items(
            list(left.values()), [right[key] for key in left], pair, open_pairs
        )
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and _equal_items(left, right, pair, open_pairs)
    if isinstance(left, float | np.floating) and isinstance(right, float | np.floating):
        return bool(left == right or (left != left and right != right))
    try:
        return bool(left == right)
    except (TypeError, ValueError, RuntimeError):
        # A foreign __eq__ that cannot answer with one bool: what cannot be shown equal counts as different.
        return False


def _equal_items(
    left: Iterable[Any], right: Iterable[Any], pair: tuple[int, int], open_pairs: set[tuple[int, int]]
) -> bool:
    open_pairs.add(pair)
    try:
        return all(_equal(one, other, open_pairs) for one, other in zip(left, right, strict=True))
    finally:
        open_pairs.discard(pair)


def _equal_tensors(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.is_nested or right.is_nested:
        if not (left.is_nested and right.is_nested) or left.size(0) != right.size(0):
            return False
        return all(map(_equal_tensors, left.unbind(), right.unbind()))
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    right = right.to(left.device)
    if left.is_floating_point() or left.is_complex():
        return torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)
    return torch.equal(left, right)
