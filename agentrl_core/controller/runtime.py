"""Where workers and actors live: in this process, or on Ray. The code that uses them is the same."""

import inspect
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

import torch

from agentrl_core.api.errors import ConfigError, WorkerError
from agentrl_core.controller.event_loop import EventLoop
from agentrl_core.controller.local import LocalWorkerGroup
from agentrl_core.controller.worker_group import ClassWithInitArgs, WorkerGroup

T = TypeVar("T")


class ActorDiedError(WorkerError):
    """The actor's process died, or cannot be reached, during a call."""


@runtime_checkable
class ActorHandle(Protocol):
    """A plain object that lives somewhere else, or here."""

    @property
    def name(self) -> str: ...

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method, async or not, from any event loop.

        Errors of agentrl keep their class; on Ray others, and the actor's death, surface as WorkerError.
        """
        ...

    def kill(self) -> None:
        """Ends the actor. Later calls raise WorkerError."""
        ...

    def restart(self) -> None:
        """Kills the actor's process, for a new one where the actor has restarts left. Nothing in this process."""
        ...


class Runtime(Protocol):
    """Makes worker groups and actors. A context manager that shuts down at its end."""

    def worker_group(
        self,
        cls: ClassWithInitArgs,
        name: str,
        world_size: int = 1,
        num_gpus: float = 0.0,
    ) -> WorkerGroup:
        """Workers of one class on ``world_size`` ranks, each with ``num_gpus`` or a fraction of one.

        ``name`` is their role in messages.
        """
        ...

    def colocated_worker_groups(
        self, classes: Mapping[str, ClassWithInitArgs], nodes: int = 1, processes_per_node: int = 1, num_gpus: float = 0
    ) -> Mapping[str, WorkerGroup]:
        """A group for each role, all of them in the same processes, each of which has ``num_gpus``."""
        ...

    def actor(
        self,
        cls: type,
        *args: Any,
        name: str,
        num_cpus: float = 1,
        num_gpus: float = 0.0,
        python: str | None = None,
        node: str = "",
        max_concurrency: int = 1000,
        restarts: int = 0,
        **kwargs: Any,
    ) -> ActorHandle:
        """An actor of a plain class.

        ``python`` is the interpreter of another environment, ``max_concurrency`` the number of calls that may be in
        flight where the class has async methods; other classes run one call at a time. ``node`` is the host that it
        must be on, by the name that ``WorkerGroup.places`` reports. A process that dies is recreated, from the same
        arguments, at most ``restarts`` times: calls under way raise ActorDiedError, later ones wait for the new one.
        """
        ...

    def share(self, value: Any) -> Any:
        """What to pass to several actors in the place of a large value, which then travels once to each node."""
        ...

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine to its end from synchronous code, always on the same event loop."""
        ...

    def shutdown(self) -> None:
        """Ends every group and actor that this runtime made. A second call does nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


def make_runtime(
    name: str,
    *,
    num_cpus: float | None = None,
    address: str | None = None,
    cpu_threads: int | None = None,
) -> Runtime:
    """The runtime ``local`` or ``ray``.

    ``cpu_threads`` bounds torch's threads in each process; None leaves this process as it is, and gives Ray's actors
    what ``OMP_NUM_THREADS`` says here, or 1.

    On Ray: ``address`` joins a cluster, otherwise one is started here with ``num_cpus`` logical CPUs (default: the
    machine's, at least 32; they count actors and may exceed the cores). Raises ConfigError on another name, or where
    Ray is not installed.
    """
    if name == "local":
        return LocalRuntime(cpu_threads)
    if name != "ray":
        raise ConfigError(f"cluster.runtime: found {name!r}, allowed are 'local' and 'ray'")
    try:
        from agentrl_core.controller.ray_runtime import RayRuntime
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError("cluster.runtime: ray is not installed: pip install 'agentrl-core[ray]'") from error
    return RayRuntime(num_cpus=num_cpus, address=address, cpu_threads=cpu_threads)


class LocalActorHandle:
    """An object of this process; methods run in the caller's thread and event loop."""

    def __init__(self, name: str, instance: Any) -> None:
        self._name = name
        self._instance = instance

    @property
    def name(self) -> str:
        """The actor's name."""
        return self._name

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Runs the method, and awaits what it returns where that can be awaited. Exceptions are not changed."""
        if self._instance is None:
            raise WorkerError(f"actor {self._name!r}: {method!r} was called after the actor was killed")
        result = getattr(self._instance, method)(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    def kill(self) -> None:
        """Forgets the object."""
        self._instance = None

    def restart(self) -> None:
        """Does nothing: the caller would die as well."""


class LocalRuntime:
    """Everything in this process."""

    def __init__(self, cpu_threads: int | None = None) -> None:
        if cpu_threads is not None:
            torch.set_num_threads(cpu_threads)
        self._loop = EventLoop()
        self._groups: list[WorkerGroup] = []
        self._actors: list[LocalActorHandle] = []
        self._is_open = True

    def worker_group(
        self,
        cls: ClassWithInitArgs,
        name: str,
        world_size: int = 1,
        num_gpus: float = 0.0,
    ) -> LocalWorkerGroup:
        """A group whose ``workers`` are plain objects."""
        group = LocalWorkerGroup(cls, world_size, role=name, loop=self._loop)
        self._groups.append(group)
        return group

    def colocated_worker_groups(
        self, classes: Mapping[str, ClassWithInitArgs], nodes: int = 1, processes_per_node: int = 1, num_gpus: float = 0
    ) -> dict[str, LocalWorkerGroup]:
        """Groups whose ``workers`` are plain objects."""
        world_size = nodes * processes_per_node
        return {role: self.worker_group(cls, role, world_size, num_gpus) for role, cls in classes.items()}

    def actor(
        self,
        cls: type,
        *args: Any,
        name: str,
        num_cpus: float = 1,
        num_gpus: float = 0.0,
        python: str | None = None,
        node: str = "",
        max_concurrency: int = 1000,
        restarts: int = 0,
        **kwargs: Any,
    ) -> LocalActorHandle:
        """An object of this process. Raises ConfigError if another interpreter is asked for."""
        if python is not None:
            raise ConfigError(
                f"actor {name!r} is to run under {python}, but the local runtime has one process: "
                "set cluster.runtime=ray, or remove the interpreter"
            )
        handle = LocalActorHandle(name, cls(*args, **kwargs))
        self._actors.append(handle)
        return handle

    def share(self, value: Any) -> Any:
        """The value itself."""
        return value

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs in the calling thread, so that ``breakpoint()`` works in what it runs."""
        return self._loop.run(coroutine)

    def shutdown(self) -> None:
        """Closes the groups, forgets the actors, closes the event loop."""
        if not self._is_open:
            return
        self._is_open = False
        for group in self._groups:
            group.close()
        for actor in self._actors:
            actor.kill()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
