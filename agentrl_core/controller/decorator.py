"""`@register`: says how a worker's method is called through its group."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, TypeVar

from agentrl_core.api.errors import WorkerError
from agentrl_core.controller import dispatch
from agentrl_core.controller.dispatch import DispatchMode
from agentrl_core.protocol import GroupFuture

MARK = "__agentrl_registered__"
Method = TypeVar("Method", bound=Callable[..., Any])


class Dispatch:
    """The dispatch modes; `register_dispatch_mode` adds more as attributes."""

    RANK_ZERO: ClassVar[DispatchMode] = DispatchMode("RANK_ZERO", dispatch.plan_rank_zero)
    ONE_TO_ALL: ClassVar[DispatchMode] = DispatchMode("ONE_TO_ALL", dispatch.plan_one_to_all)
    ALL_TO_ALL: ClassVar[DispatchMode] = DispatchMode("ALL_TO_ALL", dispatch.plan_all_to_all)
    DP_COMPUTE: ClassVar[DispatchMode] = DispatchMode("DP_COMPUTE", dispatch.plan_all_to_all)
    DP_COMPUTE_PROTO: ClassVar[DispatchMode] = DispatchMode("DP_COMPUTE_PROTO", dispatch.plan_dp_compute_proto)
    DP_COMPUTE_PROTO_WITH_FUNC: ClassVar[DispatchMode] = DispatchMode(
        "DP_COMPUTE_PROTO_WITH_FUNC", dispatch.plan_dp_compute_proto_with_func
    )
    DP_COMPUTE_METRIC: ClassVar[DispatchMode] = DispatchMode("DP_COMPUTE_METRIC", dispatch.plan_dp_compute_metric)


class Execute(Enum):
    """Which of the ranks that the dispatch mode names run the method."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True)
class Registration:
    """What `register` noted on a method."""

    dispatch_mode: DispatchMode
    execute_mode: Execute
    blocking: bool


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
        setattr(wrapped, MARK, Registration(dispatch_mode, execute_mode, blocking))
        return wrapped  # type: ignore[no-any-return]  # functools.wraps keeps the method's signature

    return decorate


def forwarding(target: Callable[[Any], Callable[..., Any]], is_async: bool) -> Any:
    """A method that calls what ``target`` returns for its object, which need not be known before the call.

    Args:
        is_async: the target is, so that the class of the method has async methods too and its calls may overlap.
    """

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return target(self)(*args, **kwargs)

    async def call_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await target(self)(*args, **kwargs)

    return call_async if is_async else call


def registrations(cls: type) -> dict[str, Registration]:
    """The registered methods of a class and its bases by name."""
    members = {name: inspect.getattr_static(cls, name) for name in dir(cls)}
    return {name: getattr(member, MARK) for name, member in members.items() if hasattr(member, MARK)}


def register_dispatch_mode(
    dispatch_mode_name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]
) -> DispatchMode:
    """Adds ``Dispatch.<dispatch_mode_name>``; `dispatch.custom_mode` says what the two functions do."""
    if hasattr(Dispatch, dispatch_mode_name):
        raise WorkerError(f"Dispatch.{dispatch_mode_name} exists: choose another name or call update_dispatch_mode")
    mode = dispatch.custom_mode(dispatch_mode_name, dispatch_fn, collect_fn)
    setattr(Dispatch, dispatch_mode_name, mode)
    return mode


def update_dispatch_mode(
    dispatch_mode: DispatchMode, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]
) -> DispatchMode:
    """Replaces the functions of a mode for methods that are registered from now on."""
    if getattr(Dispatch, dispatch_mode.name, None) is not dispatch_mode:
        raise WorkerError(f"{dispatch_mode.name} is not a registered dispatch mode: call register_dispatch_mode first")
    mode = dispatch.custom_mode(dispatch_mode.name, dispatch_fn, collect_fn)
    setattr(Dispatch, dispatch_mode.name, mode)
    return mode


def _materialized(args: tuple[Any, ...]) -> list[Any]:
    return [arg.get() if isinstance(arg, GroupFuture) else arg for arg in args]


def _materialized_values(kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(kwargs, _materialized(tuple(kwargs.values())), strict=True))
