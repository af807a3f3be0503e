"""`WorkerGroup`: calls the registered methods of many workers as if they were one."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from agentrl_core.api.errors import WorkerError
from agentrl_core.controller.decorator import Execute, Registration, registrations
from agentrl_core.controller.dispatch import Call, MeshPlace
from agentrl_core.protocol import DataProtoFuture, GroupFuture

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

    The class's registered methods are methods of the group. Unregistered ones are reached by name through
    ``execute_all…`` (same arguments for every rank) and ``execute_rank_zero…``.

    With ``auto_padding`` every batch that is split over the ranks is filled up with rows from its start until the
    chunks are equal, as if it had been made with ``auto_padding``; the result's rows for them are removed.
    """

    def __init__(self, cls: type, role: str, world_size: int) -> None:
        self.role = role
        self.auto_padding = False
        self._world_size = world_size
        self._mesh_layouts: dict[str, list[MeshPlace]] = {}
        for name, registration in registrations(cls).items():
            if hasattr(WorkerGroup, name):
                raise WorkerError(f"{cls.__name__}.{name} is registered, but worker groups have a {name} of their own")
            setattr(self, name, functools.wraps(getattr(cls, name))(functools.partial(self._call, name, registration)))

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
            "with @register, or call execute_all_sync"
        )

    def _call(self, method: str, registration: Registration, *args: Any, **kwargs: Any) -> Any:
        plan = registration.dispatch_mode.plan(self, args, kwargs)
        calls, ranks = plan.calls, plan.result_ranks
        if registration.execute_mode is Execute.RANK_ZERO:
            calls, ranks = [calls[0], *[None] * (self.world_size - 1)], [0]
        handles = self._submit(method, calls)
        called = [rank for rank, call in enumerate(calls) if call is not None]
        chosen = [handles[called.index(rank)] for rank in ranks]
        if registration.blocking:
            # Waits for every rank, so that an error of one whose result does not count is raised too.
            values = dict(zip(called, self._fetcher(method, called)(handles), strict=True))
            return plan.collect([values[rank] for rank in ranks])
        fetch = self._fetcher(method, ranks)
        if plan.is_batch:
            return DataProtoFuture(chosen, fetch, plan.collect, plan.rows)
        return GroupFuture(chosen, fetch, plan.collect)

    def execute_all_async(self, method: str, *args: Any, **kwargs: Any) -> GroupFuture[list[Any]]:
        """Starts ``method`` with the same arguments on every rank; ``get()`` gives the list of results."""
        handles = self._submit(method, [(args, kwargs)] * self.world_size)
        return GroupFuture(handles, self._fetcher(method, range(self.world_size)), list)

    def execute_all_sync(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Runs ``method`` with the same arguments on every rank; the list of results."""
        return self.execute_all_async(method, *args, **kwargs).get()

    execute_all = execute_all_async

    def execute_rank_zero_async(self, method: str, *args: Any, **kwargs: Any) -> GroupFuture[Any]:
        """Starts ``method`` on rank 0; ``get()`` gives its result."""
        handles = self._submit(method, [(args, kwargs), *[None] * (self.world_size - 1)])
        return GroupFuture(handles, self._fetcher(method, [0]), lambda results: results[0])

    def execute_rank_zero_sync(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Runs ``method`` on rank 0; its result."""
        return self.execute_rank_zero_async(method, *args, **kwargs).get()

    execute_rank_zero = execute_rank_zero_async

    def keep(self, method: str, *args: Any) -> Any:
        """Runs ``method`` with the same arguments on every rank; what may be passed to actors in the place of rank 0's
        result, which stays where it is until they ask for it."""
        return self.execute_all_sync(method, *args)[0]

    def mesh_layout(self, mesh_name: str) -> list[MeshPlace]:
        """Each rank's place in a mesh; asked once."""
        if mesh_name not in self._mesh_layouts:
            self._mesh_layouts[mesh_name] = self.execute_all_sync("get_mesh_place", mesh_name)
        return self._mesh_layouts[mesh_name]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
