"""Everything in this process: one rank after the other, no Ray, exceptions and breakpoints as in any code."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from agentrl_core.api.errors import ConfigError, WorkerError
from agentrl_core.controller.dispatch import Call
from agentrl_core.controller.event_loop import EventLoop
from agentrl_core.controller.runtime import ActorOptions, Runtime
from agentrl_core.controller.worker import WorkerContext, worker_context
from agentrl_core.controller.worker_group import ClassWithInitArgs, Fetch, WorkerGroup
from agentrl_core.protocol import DataProto


class LocalWorkerGroup(WorkerGroup):
    """Workers as plain objects, in ``workers``, called in rank order.

    For one rank, or for several whose methods do no collective. A worker gets batches with its own containers, as
    it would from another process. Async methods run to their end, on ``loop`` where one is given.
    """

    def __init__(
        self, cls_with_init: ClassWithInitArgs, world_size: int = 1, role: str = "", loop: EventLoop | None = None
    ) -> None:
        if world_size < 1:
            raise WorkerError(f"world_size is {world_size}, it must be at least 1")
        super().__init__(cls_with_init.cls, role or cls_with_init.cls.__name__, world_size)
        self._loop = loop or EventLoop()
        self._owns_loop = loop is None
        self.workers: list[Any] = []
        for rank in range(world_size):
            with worker_context(WorkerContext(rank, world_size, rank, world_size, use_gpu=True)):
                self.workers.append(cls_with_init())

    def _submit(self, method: str, calls: Sequence[Call | None]) -> list[Any]:
        if not self.workers:
            raise WorkerError(f"{self.role}.{method}: the worker group is closed")
        called = [(worker, call) for worker, call in zip(self.workers, calls, strict=True) if call is not None]
        return [self._run(worker, method, call) for worker, call in called]

    def _run(self, worker: Any, method: str, call: Call) -> Any:
        args, kwargs = call
        result = getattr(worker, method)(*map(_own, args), **{name: _own(value) for name, value in kwargs.items()})
        return self._loop.run(result) if inspect.iscoroutine(result) else result

    def _fetcher(self, method: str, ranks: Sequence[int]) -> Fetch:
        return list

    def close(self) -> None:
        """Closes the workers that have a ``close`` method, and forgets them."""
        workers, self.workers = self.workers, []
        for worker in workers:
            if callable(close := getattr(worker, "close", None)):
                close()
        if self._owns_loop and workers:
            self._loop.close()


def _own(value: Any) -> Any:
    return value.slice() if isinstance(value, DataProto) else value


@dataclass(frozen=True)
class LocalKept:
    """A value of this process."""

    value: Any

    def get(self) -> Any:
        """The value itself."""
        return self.value


class LocalActorHandle:
    """An object of this process; methods run in the caller's thread and event loop."""

    def __init__(self, name: str, instance: Any) -> None:
        self.name = name
        self._instance = instance

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Runs the method, and awaits what it returns where that can be awaited. Exceptions are not changed."""
        if self._instance is None:
            raise WorkerError(f"actor {self.name!r}: {method!r} was called after the actor was killed")
        result = getattr(self._instance, method)(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    async def call_keeping(self, method: str, *args: Any) -> tuple[Any, "LocalKept"]:
        """As :meth:`call`."""
        first, second = await self.call(method, *args)
        return first, LocalKept(second)

    def kill(self) -> None:
        """Forgets the object."""
        self._instance = None

    def restart(self) -> None:
        """Does nothing: the caller would die as well."""


class LocalRuntime(Runtime):
    """Everything in this process.

    Args:
        cpu_threads: of torch; None leaves them as they are.
    """

    def __init__(self, cpu_threads: int | None = None) -> None:
        super().__init__()
        if cpu_threads is not None:
            torch.set_num_threads(cpu_threads)
        self._groups: list[LocalWorkerGroup] = []
        self._actors: list[LocalActorHandle] = []

    def worker_group(
        self, cls: ClassWithInitArgs, name: str, world_size: int = 1, num_gpus: float = 0.0
    ) -> LocalWorkerGroup:
        """A group whose ``workers`` are plain objects."""
        self._groups.append(LocalWorkerGroup(cls, world_size, role=name, loop=self._loop))
        return self._groups[-1]

    def colocated_worker_groups(
        self, classes: Mapping[str, ClassWithInitArgs], nodes: int = 1, processes_per_node: int = 1,
        num_gpus: float = 0, python: str | None = None,
    ) -> dict[str, LocalWorkerGroup]:  # fmt: skip
        """Groups whose ``workers`` are plain objects."""
        if python is not None:
            raise ConfigError(
                f"{'+'.join(classes)} are to run under {python}, but the local runtime has one process: set "
                "cluster.runtime=ray, or remove the interpreter"
            )
        world_size = nodes * processes_per_node
        return {role: self.worker_group(cls, role, world_size, num_gpus) for role, cls in classes.items()}

    def _actor(self, name: str, options: ActorOptions, cls: ClassWithInitArgs) -> LocalActorHandle:
        if options.python is not None:
            raise ConfigError(
                f"actor {name!r} is to run under {options.python}, but the local runtime has one process: "
                "set cluster.runtime=ray, or remove the interpreter"
            )
        self._actors.append(LocalActorHandle(name, cls()))
        return self._actors[-1]

    @property
    def has_gpus(self) -> bool:
        """Whether torch sees a GPU here."""
        return torch.cuda.is_available()

    def _end(self) -> None:
        for group in self._groups:
            group.close()
        for actor in self._actors:
            actor.kill()
        self._loop.close()
