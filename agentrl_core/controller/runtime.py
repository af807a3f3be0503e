"""Where workers and actors live: in this process (``local.py``), or on Ray. The code that uses them is the same."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

from agentrl_core.api.errors import WorkerError
from agentrl_core.controller.event_loop import EventLoop
from agentrl_core.controller.worker_group import ClassWithInitArgs, WorkerGroup

T = TypeVar("T")


class ActorDiedError(WorkerError):
    """The actor's process died, or cannot be reached, during a call."""


class Kept(Protocol):
    """A value that stays where it was made until somebody asks for it. Can be passed to actors."""

    def get(self) -> Any:
        """Raises WorkerError where it is lost, because what kept it has died."""
        ...


@runtime_checkable
class ActorHandle(Protocol):
    """A plain object that lives somewhere else, or here. Handles of one actor are equal, in every process."""

    @property
    def name(self) -> str: ...

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method, async or not, from any event loop.

        Errors of agentrl keep their class; on Ray others, and the actor's death, surface as WorkerError.
        """
        ...

    async def call_keeping(self, method: str, *args: Any) -> tuple[Any, Kept]:
        """As :meth:`call`, for a method that returns two values: the second one stays over there."""
        ...

    def kill(self) -> None:
        """Ends the actor. Later calls raise WorkerError."""
        ...

    def restart(self) -> None:
        """Kills the actor's process, for a new one where the actor has restarts left. Nothing in this process."""
        ...


@dataclass(frozen=True)
class ActorOptions:
    """How an actor lives.

    Args:
        num_cpus: logical CPUs that it counts for.
        num_gpus: GPUs, or a fraction of one.
        python: the interpreter of another environment; None: this one.
        node: the host that it must be on, by the name that ``WorkerGroup.places`` reports; empty: any.
        max_concurrency: number of calls that may be in flight where the class has async methods; other classes run one
            call at a time.
        restarts: how often a process that dies is recreated, from the same arguments. Calls under way raise
            ActorDiedError, later ones wait for the new process.
    """

    num_cpus: float = 1
    num_gpus: float = 0.0
    python: str | None = None
    node: str = ""
    max_concurrency: int = 1000
    restarts: int = 0


class Runtime(ABC):
    """Makes worker groups and actors. A context manager that shuts down at its end.

    ``started`` has a callback for everything that a run starts on the runtime and must close. It is registered before
    the start, so that a start that fails half-way is closed too.
    """

    def __init__(self) -> None:
        self.started = ExitStack()
        self._loop = EventLoop()
        self._is_open = True

    @abstractmethod
    def worker_group(
        self, cls: ClassWithInitArgs, name: str, world_size: int = 1, num_gpus: float = 0.0
    ) -> WorkerGroup:
        """Workers of one class on ``world_size`` ranks, each with ``num_gpus`` or a fraction of one.

        ``name`` is their role in messages.
        """

    @abstractmethod
    def colocated_worker_groups(
        self, classes: Mapping[str, ClassWithInitArgs], nodes: int = 1, processes_per_node: int = 1,
        num_gpus: float = 0, python: str | None = None,
    ) -> Mapping[str, WorkerGroup]:  # fmt: skip
        """A group for each role, all of them in the same processes, each of which has ``num_gpus``.

        Args:
            python: the interpreter of another environment; None: this one.
        """

    def actor(
        self, cls: type, *args: Any, name: str, options: ActorOptions | None = None, **kwargs: Any
    ) -> ActorHandle:
        """An actor of a plain class, made with these arguments."""
        return self._actor(name, options or ActorOptions(), ClassWithInitArgs(cls, *args, **kwargs))

    @abstractmethod
    def _actor(self, name: str, options: ActorOptions, cls: ClassWithInitArgs) -> ActorHandle: ...

    @property
    def is_remote(self) -> bool:
        """Whether actors are other processes, to which values are sent."""
        return False

    @property
    def nodes(self) -> int:
        """Number of hosts that workers and actors may be on."""
        return 1

    @property
    def here(self) -> str:
        """This host, as :attr:`ActorOptions.node` names it."""
        return ""

    @property
    @abstractmethod
    def has_gpus(self) -> bool:
        """Whether a host has a GPU for workers and actors. This process may be on one without."""

    def when_lost(self, report: Callable[[str], None]) -> None:
        """Calls ``report`` with the reason, from another thread, if what carries the whole runtime dies."""
        return None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine to its end from synchronous code, always on the same event loop.

        It runs in the calling thread, so that ``breakpoint()`` works in what it runs; not after :meth:`overlap`.
        """
        return self._loop.run(coroutine)

    def overlap(self) -> None:
        """Let tasks that coroutines start go on between two calls of :meth:`run`, on an event loop in its own thread.
        To be called before the first of them."""
        self._loop.in_background = True

    @property
    def overlaps(self) -> bool:
        """Whether :meth:`overlap` was called."""
        return self._loop.in_background

    def shutdown(self) -> None:
        """Close what was started, the last first, and end every group and actor. A second call does nothing."""
        if self._is_open:
            try:
                self.started.close()
            finally:
                self._is_open = False
                self._end()

    @abstractmethod
    def _end(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
