"""A batch on its way to the ranks has no padding: what others gave padding to loses it first.

Shapes: B rows of a batch; P prompt tokens, R response tokens, L = P + R.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl_core.api.training_backend import SEQUENCE_COLUMNS
from agentrl_core.protocol import DataProto
from agentrl_core.protocol.ragged import Filled, Order, RaggedColumn, Rows, Values, like
from agentrl_core.workers.micro_batching import RESPONSE_COLUMNS, plain_rows

BLOCK = 256
"""Rows that are looked at together."""
Array = np.ndarray[Any, Any]


def unpadded(batch: DataProto) -> DataProto:
    """The batch with columns without padding; the batch itself where masks and positions do not follow from lengths.

    What stands behind the end of a response, which nobody may read, becomes 0 where a column had padding, and stays as
    it was in ``input_ids`` and ``responses``.
    """
    columns = dict(batch.batch.items()) if batch.batch is not None else {}
    if not {*SEQUENCE_COLUMNS, *RESPONSE_COLUMNS} <= columns.keys() or not len(batch):
        return batch
    left = columns["input_ids"].shape[1] - columns["responses"].shape[1]
    if plain_rows(columns) is None:
        sequences = _sequences(columns, left)
        if sequences is None:
            return batch
        columns |= sequences
    others = columns.keys() - {*SEQUENCE_COLUMNS, "responses", "prompts"}
    columns |= {name: like(columns["responses"], columns[name]) for name in others}
    return DataProto.from_dict(columns, batch.non_tensor_batch, batch.meta_info)


def _sequences(columns: dict[str, Tensor], left: int) -> dict[str, Tensor] | None:
    """The columns of ids, masks and positions, if a row has no gaps and no other positions."""
    ids_BL, attention_BL, positions_BL = (columns[name] for name in SEQUENCE_COLUMNS)
    responses_BR = columns["responses"]
    width = responses_BR.shape[1]
    if (attention_BL.dtype, positions_BL.dtype) != (torch.bool, torch.int32):
        return None
    prompts_B, responses_B = _count(attention_BL[:, :left].flip(-1)), _count(attention_BL[:, left:])
    rows = Rows(prompts_B + responses_B, left + width, left - prompts_B)
    attention, positions = RaggedColumn(Filled(np.bool_), rows), RaggedColumn(Order(), rows)
    # In blocks, because each needs what is to be expected of its rows.
    for block in (slice(start, start + BLOCK) for start in range(0, len(ids_BL), BLOCK)):
        expected = attention.take(block).padded(), positions.take(block).padded(), ids_BL[block, left:]
        found = attention_BL[block], positions_BL[block], responses_BR[block]
        if not all(map(torch.equal, found, expected)):
            return None
    padding = next((ids_BL[row, -1] for row in np.flatnonzero(responses_B < width)[:1]), 0)
    if left and (shorter := np.flatnonzero(prompts_B < left)[:1]).size:
        padding = ids_BL[int(shorter[0]), 0]
    ids = RaggedColumn(Values(rows.values_of(ids_BL.numpy())), rows, int(padding))
    return {
        "input_ids": ids, "attention_mask": attention, "position_ids": positions, "responses": ids.part(left, width)
    }  # fmt: skip


def _count(mask_BW: Tensor) -> Array:
    """How many places each row has before its first one with mask 0."""
    mask = mask_BW.numpy()
    if not mask.shape[1]:
        return np.zeros(len(mask), dtype=np.int64)
    first_B = mask.argmin(axis=1)
    counts_B: Array = np.where(mask[np.arange(len(mask)), first_B], mask.shape[1], first_B)
    return counts_B
