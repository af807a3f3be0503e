"""How the arguments of one call are spread over the ranks, and how one result is made of theirs.

A mode plans a call: which rank gets which arguments, whose results count, and how they are collected.

Batches are split into consecutive chunks whose lengths differ by at most one; the result has the rows in the order of
the batch. With fewer rows than ranks, the ranks without a row get a copy of one (so that collectives of all ranks go
on) and their results are dropped. A batch without rows goes to every rank as it is. A batch, or a group, with
``auto_padding`` is filled up with rows from its start until the chunks are equal; the result's rows for them are
removed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tensordict import TensorDictBase

from agentrl_core.api.errors import ProtocolError, WorkerError
from agentrl_core.protocol import DataProto, DataProtoFuture, pad_dataproto_to_divisor

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Ranks(Protocol):
    """What a dispatch function may ask of a worker group."""

    auto_padding: bool

    @property
    def world_size(self) -> int: ...

    def mesh_layout(self, mesh_name: str) -> "list[MeshPlace]":
        """Each rank's place in the mesh ``mesh_name``, as its worker declared it."""
        ...


@dataclass(frozen=True)
class MeshPlace:
    """A rank's place in a device mesh: its data-parallel rank, and whether its result stands for that group."""

    dp_rank: int
    collects: bool


@dataclass(frozen=True)
class Plan:
    """One call: the arguments of every rank (None: not called), the ranks whose results count, and their collection.

    ``is_batch`` says that the result is one DataProto; ``rows`` counts theirs, None where some are padding.
    """

    calls: list[Call | None]
    result_ranks: list[int]
    collect: Callable[[list[Any]], Any]
    is_batch: bool = False
    rows: int | None = None


@dataclass(frozen=True)
class DispatchMode:
    """A named way to plan a call: ``plan(group, args, kwargs)``."""

    name: str
    plan: Callable[[Ranks, tuple[Any, ...], dict[str, Any]], Plan]


def plan_rank_zero(group: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """Only rank 0 runs; its result is the result."""
    return Plan([(args, kwargs), *[None] * (group.world_size - 1)], [0], lambda results: results[0])


def plan_one_to_all(group: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """Every rank gets the same arguments; the result is the list of results."""
    return Plan([(args, kwargs)] * group.world_size, list(range(group.world_size)), list)


def plan_all_to_all(group: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """Every argument is a list with one entry per rank; the result is the list of results."""
    size = group.world_size
    for name, value in (*enumerate(args), *kwargs.items()):
        if not isinstance(value, list | tuple) or len(value) != size:
            found = f"{len(value)} entries" if isinstance(value, list | tuple) else f"a {type(value).__name__}"
            raise ProtocolError(f"argument {name!r} must be a list with an entry for each of {size} ranks, not {found}")
    calls: list[Call | None] = [
        (tuple(value[rank] for value in args), {name: value[rank] for name, value in kwargs.items()})
        for rank in range(size)
    ]
    return Plan(calls, list(range(size)), list)


def plan_dp_compute_proto(group: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """Batches are split over the ranks, other arguments go to all; the results are concatenated to one batch."""
    return _plan_split(group, _one_axis(group), args, kwargs, as_batch=True)


def plan_dp_compute_metric(group: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """Batches are split over the ranks, other arguments go to all; the result is the list of results."""
    return _plan_split(group, _one_axis(group), args, kwargs, as_batch=False)


def plan_dp_compute_proto_with_func(group: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """As `plan_dp_compute_proto`, with a function as first argument that goes to all ranks."""
    if not args or not callable(args[0]):
        raise ProtocolError("DP_COMPUTE_PROTO_WITH_FUNC: the first argument must be a function")
    return plan_dp_compute_proto(group, args, kwargs)


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> DispatchMode:
    """Splits over the data-parallel axis of a mesh and replicates over its others.

    The workers declare their place with `Worker.set_mesh_place(mesh_name, …)`; one rank of every data-parallel group
    gives the group's result.
    """

    def plan(group: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        return _plan_split(group, group.mesh_layout(mesh_name), args, kwargs, as_batch=True)

    return DispatchMode(f"ND_COMPUTE[{mesh_name}]", plan)


def custom_mode(name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]) -> DispatchMode:
    """A mode of two functions.

    ``dispatch_fn(worker_group, *args, **kwargs)`` returns ``(args, kwargs)`` in which every value is a list with one
    entry per rank; ``collect_fn(worker_group, results)`` makes the result of the list of results.
    """

    def plan(group: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        spread_args, spread_kwargs = dispatch_fn(group, *args, **kwargs)
        planned = plan_all_to_all(group, tuple(spread_args), dict(spread_kwargs))
        return Plan(planned.calls, planned.result_ranks, lambda results: collect_fn(group, results))

    return DispatchMode(name, plan)


def _one_axis(group: Ranks) -> list[MeshPlace]:
    return [MeshPlace(rank, True) for rank in range(group.world_size)]


def _plan_split(
    group: Ranks, places: list[MeshPlace], args: tuple[Any, ...], kwargs: dict[str, Any], as_batch: bool
) -> Plan:
    groups = max(place.dp_rank for place in places) + 1
    collecting = {place.dp_rank: rank for rank, place in enumerate(places) if place.collects}
    if sorted(collecting) != list(range(groups)):
        raise WorkerError(f"of {groups} data-parallel groups only {sorted(collecting)} have a rank that collects")

    named: dict[Any, Any] = dict(enumerate(args)) | kwargs
    for name, value in named.items():
        if isinstance(value, TensorDictBase):
            raise ProtocolError(
                f"argument {name!r} is a TensorDict: pass DataProto.from_tensordict(…) to split its rows"
            )
    split = {name: value for name, value in named.items() if isinstance(value, DataProto | DataProtoFuture)}
    pads = group.auto_padding or any(
        isinstance(value, DataProto) and value.is_padding_enabled() for value in split.values()
    )
    # Parts go straight to the ranks only if every batch of the call is cut as they are.
    rows = {value.rows if isinstance(value, DataProtoFuture) else len(value) for value in split.values()}
    common = rows.pop() if len(rows) == 1 else None
    may_pass = common is not None and not (pads and common % groups)
    futures = {name: value for name, value in split.items() if isinstance(value, DataProtoFuture)}
    passing = {name: future.parts for name, future in futures.items() if may_pass and future.passes_through(groups)}
    batches = {n: v.get() if isinstance(v, DataProtoFuture) else v for n, v in split.items() if n not in passing}
    fetched = {len(batch) for batch in batches.values()}
    if len(fetched) > 1:
        sizes = ", ".join(f"{name!r} has {len(batch)}" for name, batch in batches.items())
        raise ProtocolError(f"the batches of one call must have the same number of rows: {sizes}")
    size = next(iter(fetched), common or 0)
    is_short = 0 < size < groups
    fill = is_short or pads
    padded = {name: pad_dataproto_to_divisor(batch, groups)[0] if fill else batch for name, batch in batches.items()}
    chunks: dict[Any, Sequence[Any]] = {**passing, **{name: batch.chunk(groups) for name, batch in padded.items()}}

    def call(dp_rank: int) -> Call:
        mine = {name: chunks[name][dp_rank] if name in chunks else value for name, value in named.items()}
        return tuple(mine[number] for number in range(len(args))), {name: mine[name] for name in kwargs}

    calls: list[Call | None] = [call(place.dp_rank) for place in places]
    ranks = [collecting[dp_rank] for dp_rank in range(size if is_short else groups)]
    added = 0 if is_short or not fill else -size % groups
    if not as_batch:
        return Plan(calls, ranks, list)
    rows_of_parts = None if added else size
    return Plan(calls, ranks, lambda results: collect_batch(results, size, added), is_batch=True, rows=rows_of_parts)


def collect_batch(results: list[Any], rows: int = 0, added: int = 0) -> DataProto | None:
    """The concatenation of the ranks' batches, without the rows that padding added; None if all ranks return None."""
    if all(result is None for result in results):
        return None
    for result in results:
        if not isinstance(result, DataProto):
            raise ProtocolError(
                f"a method whose results are concatenated returned a {type(result).__name__}, not a DataProto: "
                "return one, or use Dispatch.DP_COMPUTE_METRIC to get the list of results"
            )
    kind: type[DataProto] = type(results[0])
    whole = kind.concat(results)
    return whole.slice(0, rows) if added and len(whole) == rows + added else whole
