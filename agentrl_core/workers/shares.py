"""Which rank trains which rows of an update: chosen on the driver, which sends each rank its rows only.

Shapes: B rows of the batch, n of a rank; E epochs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agentrl_core.api.training_backend import SEQUENCE_COLUMNS, Columns, DataShare
from agentrl_core.controller.dispatch import Call, DispatchMode, Plan, Ranks, plan_one_to_all
from agentrl_core.protocol import DataProto
from agentrl_core.protocol.ragged import on_values
from agentrl_core.protocol.rows import counts
from agentrl_core.workers.image_columns import images_to_share
from agentrl_core.workers.micro_batching import (
    check_columns,
    columns_of,
    counts_of,
    rank_of_rows,
    take,
)
from agentrl_core.workers.sent_rows import unpadded
from agentrl_core.workers.update import Share, mini_batches, seed_of

SHARE = "share of the update"
"""Entry of ``meta_info``: a :class:`Share`."""


class Sharing(NamedTuple):
    """How a worker's calls are spread over its group.

    Args:
        part: what this rank computes.
        by_prefix: as of :func:`agentrl_core.workers.micro_batching.rank_of_rows`.
        epochs, mini_batches: of an update.
        leaves_out: rows without an advantage have no backward pass.
        all_rows: every rank must have all rows of an update.
    """

    part: DataShare = DataShare()
    by_prefix: bool = False
    epochs: int = 1
    mini_batches: int = 1
    leaves_out: bool = False
    all_rows: bool = False


@dataclass(frozen=True)
class Parts:
    """Which part of each batch the ranks of a group compute.

    Args:
        index: of each rank.
        counts: ranks whose results count, by part.
        sharing: of the first rank.
    """

    index: list[int]
    counts: list[int]
    sharing: Sharing

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.counts)


def parts_of(group: Any) -> Parts:
    """Asks the ranks."""
    told: list[Sharing] = group.sharing()
    index = [each.part.index for each in told]
    by_part = {each.part.index: rank for rank, each in enumerate(told) if each.part.counts}
    return Parts(index, [by_part[part] for part in range(told[0].part.count)], told[0])


def spread(parts: Parts, calls: list[Call | None], collect: Callable[[list[Any]], Any]) -> Plan:
    """Calls of the parts on all ranks; the results are those of the parts."""
    return Plan([calls[part] for part in parts.index], parts.counts, collect)


def shared_out(size: int, batch: DataProto, sharing: Sharing) -> list[DataProto]:
    """The parts of a batch, so many."""
    batch = unpadded(batch)
    columns, images = columns_of(batch, (), "update"), images_to_share(batch)
    sampled_B, lengths_B = (counts(columns[name]) for name in ("response_mask", "attention_mask"))
    moving_B = sampled_B > 0
    if sharing.leaves_out:
        check_columns(batch, ("advantages",), "update")
        moving_B = has_advantage(columns["response_mask"], batch.batch["advantages"])
    measures = batch.meta_info.get("measure_only", False) or not moving_B.any()
    ranks_EB = torch.full((1 if measures else sharing.epochs, len(batch)), -1)
    passes: Any = [(0, torch.arange(len(batch)))]
    if not measures:
        every = mini_batches(sampled_B.nonzero().squeeze(-1), sharing.epochs, sharing.mini_batches, seed_of(batch))
        passes = ((epoch, rows[moving_B[rows] == moves]) for epoch, rows in every for moves in (False, True))
    for epoch, rows in passes:
        looked_at = take({name: columns[name] for name in (*SEQUENCE_COLUMNS, "responses")} | images, rows)
        ranks_EB[epoch, rows] = rank_of_rows(looked_at, size, sharing.by_prefix)
    groups_B = group_numbers(batch)
    shares = [(ranks_EB == rank).any(0).nonzero().squeeze(-1) for rank in range(size)]
    parts = [batch.select_idxs(rows) for rows in shares]
    for rows, part in zip(shares, parts, strict=True):
        part.meta_info[SHARE] = Share(rows, ranks_EB, sampled_B, lengths_B, moving_B, groups_B)
    return parts


def has_advantage(mask_BR: Tensor, advantages_BR: Tensor) -> Tensor:
    """[B] Whether an advantage of a row is not 0."""
    moved_BR = on_values(lambda mask, advantages: mask & (advantages != 0), mask_BR, advantages_BR)
    return counts(moved_BR.cpu()) > 0


def group_numbers(batch: DataProto) -> Tensor | None:
    """[B] The number of each row's prompt; None where the batch does not name it."""
    if "uid" not in batch.non_tensor_batch:
        return None
    numbers: dict[object, int] = {}
    return torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in batch.non_tensor_batch["uid"]])


def share_of(batch: DataProto, columns: Columns) -> Share:
    """The share that came with a batch; without one that of a rank which has all rows and chooses among them."""
    found: Share | None = batch.meta_info.get(SHARE)
    if found is not None:
        return found
    sampled_B, lengths_B = (counts_of(columns[name]).cpu() for name in ("response_mask", "attention_mask"))
    rows = torch.arange(len(sampled_B))
    return Share(rows, None, sampled_B, lengths_B, sampled_B > 0, group_numbers(batch))


def _plan(group: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    batch = args[0] if len(args) == 1 and isinstance(args[0], DataProto) and not kwargs else None
    if group.world_size == 1 or batch is None:
        return plan_one_to_all(group, args, kwargs)
    parts = parts_of(group)
    if parts.sharing.all_rows:
        return plan_one_to_all(group, args, kwargs)
    calls: list[Call | None] = [((part,), {}) for part in shared_out(parts.count, batch, parts.sharing)]
    return Plan([calls[part] for part in parts.index], list(range(group.world_size)), list)


SHARED = DispatchMode("SHARED", _plan)
"""Each rank gets the rows that it trains; the result is the list of results."""
