"""Dataset rows as a batch and back."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from agentrl_core.protocol import DataProto


class _Absent:
    """Marks a key that a row does not have; None is a value like any other."""

    def __repr__(self) -> str:
        return "<absent>"

    def __reduce__(self) -> str:
        return "ABSENT"


ABSENT = _Absent()


def collate(rows: Sequence[dict[str, Any]], meta_info: dict[str, Any] | None = None) -> DataProto:
    """A batch of object columns with the union of all rows' keys."""
    columns: dict[str, Any] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        columns[key] = np.fromiter((row.get(key, ABSENT) for row in rows), dtype=object, count=len(rows))
    return DataProto.from_dict(non_tensors=columns, meta_info=dict(meta_info or {}))


def rows_of(batch: DataProto) -> list[dict[str, Any]]:
    """The rows of :func:`collate`, each with the keys that it had."""
    columns = batch.non_tensor_batch
    return [
        {key: column[index] for key, column in columns.items() if column[index] is not ABSENT}
        for index in range(len(batch))
    ]
