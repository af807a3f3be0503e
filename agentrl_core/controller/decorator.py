"""`@register`: says how a worker's method is called through its group."""

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from agentrl_core.api.errors import WorkerError
from agentrl_core.controller import dispatch
from agentrl_core.controller.dispatch import DispatchMode

MARK = "__agentrl_registered__"
Method = TypeVar("Method", bound=Callable[..., Any])


class Dispatch:
    """The dispatch modes of worker groups; a `DispatchMode` of your own is used in the same way."""

    ONE_TO_ALL: ClassVar[DispatchMode] = DispatchMode("ONE_TO_ALL", dispatch.plan_one_to_all)
    DP_COMPUTE_PROTO: ClassVar[DispatchMode] = DispatchMode("DP_COMPUTE_PROTO", dispatch.plan_dp_compute_proto)


def register(dispatch_mode: DispatchMode) -> Callable[[Method], Method]:
    """Makes a method (also an async one) callable through a worker group."""
    if not isinstance(dispatch_mode, DispatchMode):
        raise WorkerError(f"dispatch_mode is {dispatch_mode!r}: use an attribute of Dispatch, or a DispatchMode")

    def decorate(method: Method) -> Method:
        setattr(method, MARK, dispatch_mode)
        return method

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


def registrations(cls: type) -> dict[str, DispatchMode]:
    """The registered methods of a class and its bases by name, with their modes."""
    members = {name: inspect.getattr_static(cls, name) for name in dir(cls)}
    return {name: getattr(member, MARK) for name, member in members.items() if hasattr(member, MARK)}
