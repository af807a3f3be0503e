"""Padding of whole batches to a divisor."""

from agentrl_core.api.errors import ProtocolError
from agentrl_core.protocol.dataproto import DataProto


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """A batch whose length is a multiple of ``size_divisor``, and the number of rows added at its end.

    The added rows repeat the batch from its start. A batch without rows stays as it is. ``data`` is not modified.
    """
    if size_divisor < 1:
        raise ProtocolError(f"pad_dataproto_to_divisor: size_divisor is {size_divisor}, it must be at least 1")
    rows = len(data)
    pad_size = -rows % size_divisor
    return data.select_idxs([row % rows for row in range(rows + pad_size)]) if pad_size else data.slice(), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """The batch without its last ``pad_size`` rows. ``data`` is not modified."""
    if not 0 <= pad_size <= len(data):
        raise ProtocolError(f"unpad_dataproto: cannot remove {pad_size} rows from a batch of {len(data)}")
    return data.slice(0, len(data) - pad_size)
