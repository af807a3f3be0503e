"""How code for verl spreads calls over the ranks: its dispatch modes, and futures as arguments.

Batches are split as by :func:`agentrl_core.controller.dispatch.plan_dp_compute_proto`. A batch, or a group, with
``auto_padding`` is filled up with rows from its start until the chunks are equal; the result's rows for them are
removed. A `DataProtoFuture` of as many parts goes from worker to worker, and nobody fetches it in between.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from tensordict import TensorDictBase

from agentrl_compat_verl.protocol import is_padding_enabled, pad_dataproto_to_divisor
from agentrl_core.api import ProtocolError, WorkerError
from agentrl_core.controller import Dispatch as CoreDispatch
from agentrl_core.controller import DispatchMode
from agentrl_core.controller.decorator import MARK
from agentrl_core.controller.dispatch import Call, Plan, collect_batch
from agentrl_core.protocol import DataProto

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])


class GroupFuture(Generic[T]):
    """What the ranks of one call will return.

    ``parts`` holds one handle per rank (the backend's own kind), ``fetch`` waits for the handles' values and
    ``collect`` makes one result of them.
    """

    def __init__(
        self,
        parts: Sequence[Any],
        fetch: Callable[[Sequence[Any]], list[Any]],
        collect: Callable[[list[Any]], T],
    ) -> None:
        self.parts = list(parts)
        self._fetch = fetch
        self._collect = collect
        self._result: list[T] = []

    def get(self) -> T:
        """Waits for all ranks; the result is collected once. Raises what the call raised."""
        if not self._result:
            self._result.append(self._collect(self._fetch(self.parts)))
        return self._result[0]


class DataProtoFuture(GroupFuture[DataProto]):
    """A batch that is still being made: rank i's part goes straight to rank i of the next group of the same size.

    ``rows`` is the number of rows if the parts are what `DataProto.chunk` would make of them; None: they are not.
    """

    def __init__(
        self,
        parts: Sequence[Any],
        fetch: Callable[[Sequence[Any]], list[Any]],
        collect: Callable[[list[Any]], DataProto],
        rows: int | None = None,
    ) -> None:
        super().__init__(parts, fetch, collect)
        self.rows = rows

    def passes_through(self, chunks: int) -> bool:
        """Whether ``chunks`` workers can take the parts as they are, so that nobody fetches them in between."""
        return self.rows is not None and chunks == len(self.parts)


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
class BatchPlan(Plan):
    """A plan whose result is one DataProto; ``rows`` counts its rows, None where some are padding."""

    rows: int | None = None


def plan_rank_zero(group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """Only rank 0 runs; its result is the result."""
    return Plan([(args, kwargs), *[None] * (group.world_size - 1)], [0], lambda results: results[0])


def plan_all_to_all(group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
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


def plan_dp_compute_proto(group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """Batches are split over the ranks, other arguments go to all; the results are concatenated to one batch."""
    return _plan_split(group, _one_axis(group), args, kwargs, as_batch=True)


def plan_dp_compute_metric(group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """Batches are split over the ranks, other arguments go to all; the result is the list of results."""
    return _plan_split(group, _one_axis(group), args, kwargs, as_batch=False)


def plan_dp_compute_proto_with_func(group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    """As `plan_dp_compute_proto`, with a function as first argument that goes to all ranks."""
    if not args or not callable(args[0]):
        raise ProtocolError("DP_COMPUTE_PROTO_WITH_FUNC: the first argument must be a function")
    return plan_dp_compute_proto(group, args, kwargs)


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> DispatchMode:
    """Splits over the data-parallel axis of a mesh and replicates over its others.

    The workers declare their place with `Worker.set_mesh_place(mesh_name, …)`; one rank of every data-parallel group
    gives the group's result.
    """

    def plan(group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        return _plan_split(group, group.mesh_layout(mesh_name), args, kwargs, as_batch=True)

    return DispatchMode(f"ND_COMPUTE[{mesh_name}]", plan)


class Dispatch(CoreDispatch):
    """The dispatch modes; `register_dispatch_mode` adds more as attributes."""

    RANK_ZERO: ClassVar[DispatchMode] = DispatchMode("RANK_ZERO", plan_rank_zero)
    ALL_TO_ALL: ClassVar[DispatchMode] = DispatchMode("ALL_TO_ALL", plan_all_to_all)
    DP_COMPUTE: ClassVar[DispatchMode] = DispatchMode("DP_COMPUTE", plan_all_to_all)
    DP_COMPUTE_PROTO: ClassVar[DispatchMode] = DispatchMode("DP_COMPUTE_PROTO", plan_dp_compute_proto)
    DP_COMPUTE_PROTO_WITH_FUNC: ClassVar[DispatchMode] = DispatchMode(
        "DP_COMPUTE_PROTO_WITH_FUNC", plan_dp_compute_proto_with_func
    )
    DP_COMPUTE_METRIC: ClassVar[DispatchMode] = DispatchMode("DP_COMPUTE_METRIC", plan_dp_compute_metric)


class Execute(Enum):
    """Which of the ranks that the dispatch mode names run the method."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True)
class RegisteredMode(DispatchMode):
    """What `register` noted on a method: its mode, and whether a call waits for the result."""

    blocking: bool = True


def register(
    dispatch_mode: DispatchMode = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
) -> Callable[[Method], Method]:
    """Makes a method (also an async one) callable through a worker group.

    ``blocking=False`` returns a future, which the next call may take as an argument. A future that reaches the worker
    whole is replaced by its value there, unless ``materialize_futures`` is False.
    """
    if not isinstance(dispatch_mode, DispatchMode):
        raise WorkerError(f"dispatch_mode is {dispatch_mode!r}: use an attribute of Dispatch, or a DispatchMode")

    def first_only(group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        plan = dispatch_mode.plan(group, args, kwargs)
        return Plan([plan.calls[0], *[None] * (group.world_size - 1)], [0], plan.collect)

    runs = first_only if execute_mode is Execute.RANK_ZERO else dispatch_mode.plan

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return method(self, *_materialized(args), **_materialized_values(kwargs))

        @functools.wraps(method)
        async def call_async(self: Any, *args: Any, **kwargs: Any) -> Any:
            return await method(self, *_materialized(args), **_materialized_values(kwargs))

        wrapped: Any = method
        if materialize_futures:
            wrapped = call_async if inspect.iscoroutinefunction(method) else call
        setattr(wrapped, MARK, RegisteredMode(dispatch_mode.name, runs, blocking))
        return wrapped  # type: ignore[no-any-return]  # functools.wraps keeps the method's signature

    return decorate


def custom_mode(name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]) -> DispatchMode:
    """A mode of two functions.

    ``dispatch_fn(worker_group, *args, **kwargs)`` returns ``(args, kwargs)`` in which every value is a list with one
    entry per rank; ``collect_fn(worker_group, results)`` makes the result of the list of results.
    """

    def plan(group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        spread_args, spread_kwargs = dispatch_fn(group, *args, **kwargs)
        planned = plan_all_to_all(group, tuple(spread_args), dict(spread_kwargs))
        return Plan(planned.calls, planned.result_ranks, lambda results: collect_fn(group, results))

    return DispatchMode(name, plan)


def register_dispatch_mode(
    dispatch_mode_name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]
) -> DispatchMode:
    """Adds ``Dispatch.<dispatch_mode_name>``; `custom_mode` says what the two functions do."""
    if hasattr(Dispatch, dispatch_mode_name):
        raise WorkerError(f"Dispatch.{dispatch_mode_name} exists: choose another name or call update_dispatch_mode")
    mode = custom_mode(dispatch_mode_name, dispatch_fn, collect_fn)
    setattr(Dispatch, dispatch_mode_name, mode)
    return mode


def update_dispatch_mode(
    dispatch_mode: DispatchMode, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]
) -> DispatchMode:
    """Replaces the functions of a mode for methods that are registered from now on."""
    if getattr(Dispatch, dispatch_mode.name, None) is not dispatch_mode:
        raise WorkerError(f"{dispatch_mode.name} is not a registered dispatch mode: call register_dispatch_mode first")
    mode = custom_mode(dispatch_mode.name, dispatch_fn, collect_fn)
    setattr(Dispatch, dispatch_mode.name, mode)
    return mode


def _materialized(args: tuple[Any, ...]) -> list[Any]:
    return [arg.get() if isinstance(arg, GroupFuture) else arg for arg in args]


def _materialized_values(kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(kwargs, _materialized(tuple(kwargs.values())), strict=True))


def _one_axis(group: Any) -> list[MeshPlace]:
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
        isinstance(value, DataProto) and is_padding_enabled(value) for value in split.values()
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

    def collect(results: list[Any]) -> DataProto | None:
        whole = collect_batch(results)
        return whole.slice(0, size) if whole is not None and added and len(whole) == size + added else whole

    return BatchPlan(calls, ranks, collect, None if added else size)
