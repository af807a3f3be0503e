"""`WorkerGroup`: calls the registered methods of many workers as if they were one."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from agentrl_core.api.errors import WorkerError
from agentrl_core.controller.decorator import Dispatch, registrations
from agentrl_core.controller.dispatch import Call, DispatchMode

Fetch = Callable[[Sequence[Any]], list[Any]]


class ClassWithInitArgs:
    """A class with the arguments that each rank makes its worker with."""

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs

    def __call__(self) -> Any:
        """A new object of the class."""
        return self.cls(*self.args, **self.kwargs)


@dataclass(frozen=True)
class Place:
    """Where a rank computes.

    Args:
        node: the host, by its name in the runtime; empty where there is only one.
        devices: of the host that the rank was given, as ``CUDA_VISIBLE_DEVICES`` names them; empty on the CPU.
    """

    node: str = ""
    devices: tuple[str, ...] = ()


class WorkerGroup(ABC):
    """Workers of one class, one per rank.

    The class's registered methods are methods of the group.
    """

    def __init__(self, cls: type, role: str, world_size: int) -> None:
        self.role = role
        self._world_size = world_size
        for name, mode in registrations(cls).items():
            if hasattr(type(self), name):
                raise WorkerError(f"{cls.__name__}.{name} is registered, but worker groups have a {name} of their own")
            setattr(self, name, functools.wraps(getattr(cls, name))(functools.partial(self._call, name, mode)))

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._world_size

    @abstractmethod
    def _submit(self, method: str, calls: Sequence[Call | None]) -> list[Any]:
        """Starts the method on every rank with a call; one handle for each of those."""

    @abstractmethod
    def _fetcher(self, method: str, ranks: Sequence[int]) -> Fetch:
        """A function that waits for the handles of ``ranks`` and returns their values."""

    def places(self) -> list[Place]:
        """Of each rank."""
        return [Place()] * self.world_size

    @abstractmethod
    def close(self) -> None:
        """Ends the workers. Further calls fail."""

    def __getattr__(self, name: str) -> Any:
        # Only reached for names that are neither registered nor of the group itself; it tells type checkers that
        # groups have methods which are bound at run time.
        raise AttributeError(
            f"the worker group {self.__dict__.get('role', '')!r} has no method {name!r}: decorate the worker's method "
            "with @register"
        )

    def _call(self, method: str, mode: DispatchMode, *args: Any, **kwargs: Any) -> Any:
        plan = mode.plan(self, args, kwargs)
        handles = self._submit(method, plan.calls)
        called = [rank for rank, call in enumerate(plan.calls) if call is not None]
        # Waits for every rank, so that an error of one whose result does not count is raised too.
        values = dict(zip(called, self._fetcher(method, called)(handles), strict=True))
        return plan.collect([values[rank] for rank in plan.result_ranks])

    def keep(self, method: str, *args: Any) -> Any:
        """Runs ``method`` with the same arguments on every rank; what may be passed to actors in the place of rank 0's
        result, which stays where it is until they ask for it."""
        return self._call(method, Dispatch.ONE_TO_ALL, *args)[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
