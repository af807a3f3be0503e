"""Parameters that lie in pieces on several ranks, brought together on one of them.

Every rank knows who has which piece of which unit, so that no rank asks another.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl_backend_megatron.names import Unit


@dataclass(frozen=True)
class Piece:
    """A stretch of a shard that a rank has.

    Args:
        rank: of all ranks.
        index: of the shard, among those that tensor parallelism makes.
        start, stop: elements of the flat shard.
    """

    rank: int
    index: int
    start: int
    stop: int


class Pieces:
    """Who has what.

    Args:
        own: the pieces of this rank by the unit's name.
        shards: into which tensor parallelism cuts a unit that is cut.
        rank, size: of this rank, and how many there are. All ranks must make this together.
    """

    def __init__(self, own: Mapping[str, Piece], shards: int, rank: int, size: int) -> None:
        told: list[Mapping[str, Piece]] = [own]
        if size > 1:
            told = [{}] * size
            dist.all_gather_object(told, dict(own))
        self.by_unit: dict[str, list[Piece]] = defaultdict(list)
        for each in told:
            for name, piece in each.items():
                self.by_unit[name].append(piece)
        self._shards = shards
        self._rank = rank

    def count(self, unit: Unit) -> int:
        """Shards of a unit."""
        return 1 if unit.cut == "whole" else self._shards

    def whole(
        self,
        unit: Unit,
        name: str,
        to: int,
        piece: Callable[[], Tensor],
        like: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> Tensor | None:
        """The unit on the rank ``to``, None on others. All ranks that have a piece, and this one, must call it.

        Args:
            name: of the unit among the pieces.
            piece: gives what this rank has, flat; called only where it has some.
            like, device: what comes from other ranks.
            group: default: of all ranks.
        """
        pieces = self.by_unit[name]
        if self._rank != to:
            for _ in (each for each in pieces if each.rank == self._rank):
                dist.send(piece().to(device, like).contiguous(), to, group)
            return None
        count = self.count(unit)
        shape = unit.shard_shape(count)
        flat = [torch.empty(prod(shape), dtype=like, device=device) for _ in range(count)]
        for each in pieces:
            target = flat[each.index][each.start : each.stop]
            if each.rank == to:
                target.copy_(piece())
            else:
                dist.recv(target, each.rank, group)
        return unit.unsharded([shard.view(shape) for shard in flat])


def buckets(units: Sequence[Unit], itemsize: int, bucket_bytes: int) -> Iterator[list[Unit]]:
    """Consecutive units of at most so many bytes, or one."""
    bucket: list[Unit] = []
    size = 0
    for unit in units:
        nbytes = itemsize * sum(prod(shape) for shape in unit.shapes)
        if bucket and size + nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(unit)
        size += nbytes
    if bucket:
        yield bucket
