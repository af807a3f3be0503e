"""A batch on its way to the ranks: without padding in between, padded again where it arrives.

Shapes: B rows of a batch; P prompt tokens, R response tokens, L = P + R.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from agentrl_core.protocol import DataProto
from agentrl_core.protocol.rows import padded
from agentrl_core.workers.micro_batching import RESPONSE_COLUMNS, SEQUENCE_COLUMNS

BLOCK = 256
"""Rows that are looked at together."""
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class SentRows:
    """Rows of a batch without padding. Pickled, it arrives as a :class:`DataProto` with the columns of the batch.

    What stands behind the end of a response, which nobody may read, arrives as 0, and as it was in ``input_ids`` and
    ``responses``.

    Args:
        prompts_B, responses_B: lengths of the rows.
        widths: P and R of the batch.
        padding: what ``input_ids`` has where no token is.
        prompts: ids of all prompts, one row after the other.
        columns: those of the response tokens, in the same way.
        objects, meta_info: of the batch.
    """

    prompts_B: Array
    responses_B: Array
    widths: tuple[int, int]
    padding: int
    prompts: Array
    columns: Mapping[str, Array]
    objects: Mapping[str, Any]
    meta_info: dict[str, Any]

    @classmethod
    def of(cls, batch: DataProto) -> Self | None:
        """None where masks and positions do not follow from lengths: a row has gaps or other positions."""
        columns = dict(batch.batch.items()) if batch.batch is not None else {}
        if not {*SEQUENCE_COLUMNS, *RESPONSE_COLUMNS} <= columns.keys() or not len(batch):
            return None
        ids_BL, attention_BL, positions_BL = (columns.pop(name) for name in SEQUENCE_COLUMNS)
        shape, width = columns["responses"].shape, columns["responses"].shape[1]
        if any(column.shape != shape or column.dtype == torch.bfloat16 for column in columns.values()):
            return None
        if (attention_BL.dtype, positions_BL.dtype) != (torch.bool, torch.int32):
            return None
        left = ids_BL.shape[1] - width
        prompts_B, responses_B = _count(attention_BL[:, :left].flip(-1)), _count(attention_BL[:, left:])
        # In blocks, because each needs what is to be expected of its rows.
        for block in (slice(start, start + BLOCK) for start in range(0, len(ids_BL), BLOCK)):
            attention_bL, expected_bL = _places(prompts_B[block], responses_B[block], left, width)
            ids_bR = columns["responses"][block], ids_BL[block, left:]
            for found, expected in ((attention_BL[block], attention_bL), (positions_BL[block], expected_bL), ids_bR):
                if not torch.equal(found, expected):
                    return None
        padding = next((ids_BL[row, -1] for row in np.flatnonzero(responses_B < width)[:1]), 0)
        if left and (shorter := np.flatnonzero(prompts_B < left)[:1]).size:
            padding = ids_BL[int(shorter[0]), 0]
        ends = responses_B.tolist()
        flat = {name: _joined(column, [0] * len(ends), ends) for name, column in columns.items()}
        prompts = _joined(ids_BL[:, :left], (left - prompts_B).tolist(), [left] * len(ends))
        return cls(
            prompts_B, responses_B, (left, width), int(padding), prompts, flat, batch.non_tensor_batch, batch.meta_info
        )

    def take(self, rows_n: Tensor) -> Self:
        """Some of the rows."""
        rows = rows_n.numpy()
        return replace(
            self,
            prompts_B=self.prompts_B[rows],
            responses_B=self.responses_B[rows],
            prompts=_taken(self.prompts, self.prompts_B, rows),
            columns={name: _taken(column, self.responses_B, rows) for name, column in self.columns.items()},
            objects={name: column[rows] for name, column in self.objects.items()},
            meta_info=dict(self.meta_info),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, tuple(vars(self).values())


def parts_of(group: Any, batch: DataProto, shares: Sequence[Tensor]) -> list[Any]:
    """The rows [n] of each share, as a group takes them."""
    sent = SentRows.of(batch) if getattr(group, "pickles", False) else None
    return [batch.select_idxs(rows) if sent is None else sent.take(rows) for rows in shares]


def _arrived(*fields: Any) -> DataProto:
    sent = SentRows(*fields)
    left, width = sent.widths
    columns = {
        name: torch.from_numpy(padded(flat, sent.responses_B, sent.padding if name == "responses" else 0, width))
        for name, flat in sent.columns.items()
    }
    prompts_BP = torch.from_numpy(padded(sent.prompts, sent.prompts_B, sent.padding, left, left - sent.prompts_B))
    columns["input_ids"] = torch.cat([prompts_BP, columns["responses"]], -1)
    columns["attention_mask"], columns["position_ids"] = _places(sent.prompts_B, sent.responses_B, left, width)
    return DataProto.from_dict(tensors=columns, non_tensors=sent.objects, meta_info=sent.meta_info)


def _count(mask_BW: Tensor) -> Array:
    """How many places each row has before its first one with mask 0."""
    mask = mask_BW.numpy()
    if not mask.shape[1]:
        return np.zeros(len(mask), dtype=np.int64)
    first_B = mask.argmin(axis=1)
    counts_B: Array = np.where(mask[np.arange(len(mask)), first_B], mask.shape[1], first_B)
    return counts_B


def _joined(column_BW: Tensor, starts: list[int], ends: list[int]) -> Array:
    rows = zip(column_BW.numpy(), starts, ends, strict=True)
    return np.concatenate([row_W[start:end] for row_W, start, end in rows])


def _taken(flat: Array, lengths_B: Array, rows: Array) -> Array:
    ends_B = lengths_B.cumsum()
    starts_B = ends_B - lengths_B
    parts = [flat[start:end] for start, end in zip(starts_B[rows].tolist(), ends_B[rows].tolist(), strict=True)]
    return np.concatenate(parts) if parts else flat[:0]


def _places(prompts_B: Array, responses_B: Array, left: int, width: int) -> tuple[Tensor, Tensor]:
    """Where tokens are [B, L], and their positions [B, L] int32, as ``to_data_proto`` makes them."""
    first_B1, last_B1 = (
        torch.from_numpy(each).int().unsqueeze(-1) for each in (left - prompts_B, prompts_B + responses_B)
    )
    order_BL = torch.arange(left + width, dtype=torch.int32) - first_B1
    return (order_BL >= 0) & (order_BL < last_B1), order_BL.clamp_(min=0).minimum((last_B1 - 1).clamp(min=0))
