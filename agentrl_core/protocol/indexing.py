"""Row indices in the forms that users write them."""

from typing import Any

import numpy as np
import torch

from agentrl_core.api.errors import ProtocolError
from agentrl_core.protocol.rows import RowIndex


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
    if array.size == 0 and array.dtype != np.bool_:
        return torch.empty(0, dtype=torch.int64)
    if array.dtype == np.bool_:
        if len(array) != size:
            raise ProtocolError(f"the boolean row index has {len(array)} entries, the batch has {size} rows")
        return torch.from_numpy(np.flatnonzero(array))
    if array.dtype.kind not in "iu":
        raise ProtocolError(f"row indices are ints or booleans, not {array.dtype}")
    wrong = array[(array < -size) | (array >= size)]
    if wrong.size:
        raise ProtocolError(f"row {int(wrong[0])} is out of range: the batch has {size} rows")
    rows = array.astype(np.int64)
    return torch.from_numpy(np.where(rows < 0, rows + size, rows))
