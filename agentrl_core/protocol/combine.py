"""Putting batches together: meta_info, object columns, and the check that a union contradicts nothing.

``meta_info`` is merged by type. ``metrics`` maps names to a number or a list of numbers: afterwards every name has one
list with the values of all parts, in order. ``timing`` maps names to seconds: the slowest part counts, since it is the
one that the others waited for. Every other entry must be equal in all parts that have it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentrl_core.api.errors import ProtocolError
from agentrl_core.protocol.containers import ObjectArray, copy_containers, equal


def merge_meta_info(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One meta_info out of many, sharing no container with them.

    Raises ProtocolError that names every entry whose values differ.
    """
    merged: dict[str, Any] = {}
    conflicts = []
    for key in dict.fromkeys(key for part in parts for key in part):
        values = [part[key] for part in parts if key in part]
        if key in ("metrics", "timing"):
            lists: dict[str, list[Any]] = {}
            for name, value in _entries(key, values):
                lists.setdefault(name, []).extend(value if isinstance(value, list | tuple) else [value])
            merged[key] = lists if key == "metrics" else {name: max(seconds) for name, seconds in lists.items()}
        elif all(equal(values[0], value) for value in values[1:]):
            merged[key] = copy_containers(values[0])
        else:
            other = next(value for value in values[1:] if not equal(values[0], value))
            conflicts.append(f"{key!r} ({_short(values[0])} and {_short(other)})")
    if conflicts:
        raise ProtocolError(
            f"meta_info differs between the batches in {', '.join(conflicts)}: "
            "make the values equal, remove them, or put numbers into meta_info['metrics']"
        )
    return merged


def _entries(key: str, part: Any) -> list[tuple[str, Any]]:
    if isinstance(part, list | tuple):
        # One mapping for each rank or micro-batch.
        return [entry for each in part for entry in _entries(key, each)]
    if not isinstance(part, Mapping):
        raise ProtocolError(f"meta_info[{key!r}] is a {type(part).__name__}: it must map names to numbers")
    return list(part.items())


def cat_objects(parts: Sequence[Mapping[str, ObjectArray]]) -> dict[str, ObjectArray]:
    """Object columns with the rows of all parts in order. Raises ProtocolError where the columns do not fit."""
    first = parts[0]
    for number, part in enumerate(parts[1:], start=1):
        missing = first.keys() ^ part.keys()
        if missing:
            raise ProtocolError(
                f"concat: part {number} and part 0 do not have the same non-tensor columns: "
                f"{', '.join(map(repr, sorted(missing)))} in one only"
            )
        for key in first:
            if first[key].shape[1:] != part[key].shape[1:]:
                raise ProtocolError(
                    f"concat: non_tensor_batch[{key!r}] has shape {list(first[key].shape)} in part 0 "
                    f"and {list(part[key].shape)} in part {number}"
                )
    return {key: np.concatenate([part[key] for part in parts]) for key in first}


def check_union(kind: str, left: Mapping[str, Any], right: Mapping[str, Any]) -> None:
    """Raises ProtocolError that names every key that both have with values that differ. NaN equals NaN."""
    conflicts = [key for key in right if key in left and not equal(left[key], right[key])]
    if not conflicts:
        return
    shown = ", ".join(f"{key!r} ({_size(left[key])} and {_size(right[key])})" for key in conflicts)
    raise ProtocolError(f"union: {kind} differs between the two batches in {shown}: drop or rename one of them first")


def _size(value: Any) -> str:
    # Asking a strided nested tensor for its shape raises an error.
    if getattr(value, "is_nested", False) or not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return "nested"
    return f"{value.dtype} {list(value.shape)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
