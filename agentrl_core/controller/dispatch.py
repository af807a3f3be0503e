"""How the arguments of one call are spread over the ranks, and how one result is made of theirs.

A mode plans a call: which rank gets which arguments, whose results count, and how they are collected.

Batches are split into consecutive chunks whose lengths differ by at most one; the result has the rows in the order of
the batch. With fewer rows than ranks, the ranks without a row get a copy of one (so that collectives of all ranks go
on) and their results are dropped. A batch without rows goes to every rank as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tensordict import TensorDictBase

from agentrl_core.api.errors import ProtocolError
from agentrl_core.protocol import DataProto

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Ranks(Protocol):
    """What a dispatch function may ask of a worker group."""

    @property
    def world_size(self) -> int: ...


@dataclass(frozen=True)
class Plan:
    """One call: the arguments of every rank (None: not called), the ranks whose results count, and their collection."""

    calls: list[Call | None]
    result_ranks: list[int]
    collect: Callable[[list[Any]], Any]


@dataclass(frozen=True)
class DispatchMode:
    """A named way to plan a call: ``plan(group, args, kwargs)``."""

    name: str
    plan: Callable[[Any, tuple[Any, ...], dict[str, Any]], Plan]


def plan_one_to_all(group: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """Every rank gets the same arguments; the result is the list of results."""
    return Plan([(args, kwargs)] * group.world_size, list(range(group.world_size)), list)


def plan_dp_compute_proto(group: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """Batches are split over the ranks, other arguments go to all; the results are concatenated to one batch."""
    named: dict[Any, Any] = dict(enumerate(args)) | kwargs
    for name, value in named.items():
        if isinstance(value, TensorDictBase):
            raise ProtocolError(
                f"argument {name!r} is a TensorDict: pass DataProto.from_tensordict(…) to split its rows"
            )
    batches = {name: value for name, value in named.items() if isinstance(value, DataProto)}
    if len({len(batch) for batch in batches.values()}) > 1:
        sizes = ", ".join(f"{name!r} has {len(batch)}" for name, batch in batches.items())
        raise ProtocolError(f"the batches of one call must have the same number of rows: {sizes}")
    size, ranks = len(next(iter(batches.values()), ())), group.world_size
    is_short = 0 < size < ranks
    filled = [row % size for row in range(ranks)] if is_short else None
    chunks = {
        name: (batch if filled is None else batch.select_idxs(filled)).chunk(ranks) for name, batch in batches.items()
    }

    def call(rank: int) -> Call:
        mine = {name: chunks[name][rank] if name in chunks else value for name, value in named.items()}
        return tuple(mine[number] for number in range(len(args))), {name: mine[name] for name in kwargs}

    return Plan([call(rank) for rank in range(ranks)], list(range(size if is_short else ranks)), collect_batch)


def collect_batch(results: list[Any]) -> DataProto | None:
    """The concatenation of the ranks' batches; None if all ranks return None."""
    if all(result is None for result in results):
        return None
    for result in results:
        if not isinstance(result, DataProto):
            raise ProtocolError(
                f"a method whose results are concatenated returned a {type(result).__name__}, not a DataProto: "
                "return one, or use Dispatch.ONE_TO_ALL to get the list of results"
            )
    kind: type[DataProto] = type(results[0])
    return kind.concat(results)
