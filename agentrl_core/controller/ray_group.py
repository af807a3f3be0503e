"""Worker groups on Ray."""

import functools
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray

from agentrl_core.api.errors import WorkerError
from agentrl_core.controller.dispatch import Call
from agentrl_core.controller.ray_failures import Watch, fetch, kill
from agentrl_core.controller.ray_hosts import route_name, start_hosts
from agentrl_core.controller.ray_pool import RayResourcePool
from agentrl_core.controller.worker_group import ClassWithInitArgs, Fetch, Place, WorkerGroup
from agentrl_core.protocol import DataProto


class ColocatedClasses(ClassWithInitArgs):
    """Several worker classes by role, for one process per rank."""

    def __init__(self, class_dict: Mapping[str, ClassWithInitArgs]) -> None:
        super().__init__(object)
        self.class_dict = dict(class_dict)


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> ColocatedClasses:
    """What a `RayWorkerGroup` makes one process per rank of, with a worker of every role; `RayWorkerGroup.spawn`
    gives the groups of the roles.
    """
    return ColocatedClasses(class_dict)


class Processes:
    """The Ray actors of some ranks. Several groups may call them, from several threads; one of these ends them."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self.actors = list(actors)
        # All ranks must get calls in the same order: their collectives would wait for each other.
        self.order = threading.Lock()
        self.nodes: Sequence[str] = ()
        self.watch: Watch | None = None

    def watch_over(self, role: str, nodes: Sequence[str]) -> Watch:
        """Reports deaths from now on; ``nodes`` has the address of each rank's node."""
        self.nodes = nodes
        self.watch = Watch(role, self.actors, nodes)
        return self.watch

    def end(self) -> None:
        """Kills the actors."""
        if self.watch is not None:
            self.watch.stop()
        for actor in self.actors:
            kill(actor)


class RayGroup(WorkerGroup):
    """Calls the workers of ``roles`` in Ray actors that are there already.

    An exception of a rank is raised as WorkerError with the first root traceback, its cause being the original
    exception; a dead worker as WorkerError that names role, rank, node, exit cause and the method that it was in.
    A `Watch` looks after the processes: once one has died, the others are ended, and calls under way and later ones
    raise that. Closing the group ends the processes if it ``owns_processes``.
    """

    def __init__(
        self, cls: type, role: str, processes: Processes, roles: Mapping[str, type], owns_processes: bool = False
    ) -> None:
        super().__init__(cls, role, len(processes.actors))
        self._processes = processes
        self._roles = dict(roles)
        self._owns_processes = owns_processes
        self._is_open = True

    @property
    def nodes(self) -> Sequence[str]:
        """The address of each rank's node."""
        return self._processes.nodes

    def spawn(self, prefix_set: Iterable[str]) -> "dict[str, RayGroup]":
        """A group for each of these roles of a colocated group, over the same processes.

        Closing one of them ends nothing; this group owns the processes.
        """
        groups = {}
        for role in prefix_set:
            if role not in self._roles:
                raise WorkerError(f"{self.role!r} has no role {role!r}; it has {sorted(self._roles)}")
            groups[role] = RayGroup(self._roles[role], role, self._processes, {role: self._roles[role]})
        return groups

    def _submit(self, method: str, calls: Sequence[Call | None], keeps: bool = False) -> list[Any]:
        if not self._is_open:
            raise WorkerError(f"{self.role}.{method}: the worker group is closed")
        watch = self._processes.watch
        if watch is not None:
            watch.raise_if_dead()
        put = _PutOnce(calls)
        handles = []
        with self._processes.order:
            for rank, (actor, call) in enumerate(zip(self._processes.actors, calls, strict=True)):
                if call is not None:
                    if watch is not None:
                        watch.last_calls[rank] = f"{self.role}.{method}"
                    args, kwargs = map(put, call[0]), {name: put(value) for name, value in call[1].items()}
                    route = getattr(actor, route_name(self.role, method), None)
                    if keeps:
                        handles.append(actor.keep.remote(self.role, method, *args, **kwargs))
                    elif route is None:
                        handles.append(actor.call.remote(self.role, method, *args, **kwargs))
                    else:
                        handles.append(route.remote(*args, **kwargs))
        return handles

    def keep(self, method: str, *args: Any) -> Any:
        """See :meth:`WorkerGroup.keep`: it never comes to this process."""
        handles = self._submit(method, [(args, {})] * self.world_size, keeps=True)
        return self._fetcher(method, range(self.world_size))(handles)[0][0]

    def _fetcher(self, method: str, ranks: Sequence[int]) -> Fetch:
        where = [f" on node {node}" for node in self.nodes] or [""] * self.world_size
        labels = [f"rank {rank} of {self.world_size} of {self.role!r}{where[rank]}" for rank in ranks]
        return functools.partial(fetch, method, labels, self._processes.watch)

    def places(self) -> list[Place]:
        """See :meth:`WorkerGroup.places`."""
        asked = [actor.gpus.remote() for actor in self._processes.actors]
        return [Place(node, devices) for node, devices in self._fetcher("gpus", range(self.world_size))(asked)]

    def close(self) -> None:
        """Ends the processes if the group owns them. Further calls fail."""
        if self._is_open and self._owns_processes:
            self._processes.end()
        self._is_open = False


class RayWorkerGroup(RayGroup):
    """Starts one Ray actor per rank of a resource pool, with one worker of the class in it, or several colocated ones.

    With ``owns_pool`` the pool is closed with the group. ``python`` is the interpreter of another environment.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: ClassWithInitArgs,
        role: str = "",
        owns_pool: bool = False,
        python: str | None = None,
    ) -> None:
        self._python = python
        role = role or ray_cls_with_init.cls.__name__
        classes = {role: ray_cls_with_init}
        if isinstance(ray_cls_with_init, ColocatedClasses):
            classes = ray_cls_with_init.class_dict
        actors = self._start(resource_pool, classes)
        roles = {name: item.cls for name, item in classes.items()}
        super().__init__(ray_cls_with_init.cls, role, Processes(actors), roles, owns_processes=True)
        self.resource_pool = resource_pool
        self._owns_pool = owns_pool
        ranks = range(self.world_size)
        try:
            addresses = self._fetcher("free_address", ranks)([actor.free_address.remote() for actor in actors])
            watch = self._processes.watch_over(role, [address for address, _ in addresses])
            for name, item in classes.items():
                plain = ray.put(ClassWithInitArgs(item.cls, *item.args, **item.kwargs))
                built = [actor.build.remote(name, plain, *addresses[0]) for actor in actors]
                watch.last_calls = [f"{name}.__init__"] * len(actors)
                self._fetcher(f"{name}.__init__", ranks)(built)
        except WorkerError:
            self.close()
            raise

    def _start(self, pool: RayResourcePool, classes: Mapping[str, ClassWithInitArgs]) -> list[Any]:
        options = {"runtime_env": {"py_executable": self._python}} if self._python else {}
        return start_hosts(pool, classes, lambda rank: options)

    @property
    def num_cpus(self) -> float:
        """The CPUs that the group's actors hold."""
        return self.resource_pool.num_cpus * self.world_size if self._is_open else 0.0

    @property
    def num_gpus(self) -> float:
        """The GPUs that the group's actors hold."""
        return self.resource_pool.num_gpus * self.world_size if self._is_open else 0.0

    def close(self) -> None:
        """Kills the actors that this group started, and gives the pool back if it owns it."""
        super().close()
        if self._owns_pool:
            self.resource_pool.close()


class _PutOnce:
    """Puts a batch that several ranks get into the object store once."""

    def __init__(self, calls: Sequence[Call | None]) -> None:
        self._refs: dict[int, Any] = {}
        self._counts: dict[int, int] = {}
        for args, kwargs in filter(None, calls):
            for value in (*args, *kwargs.values()):
                self._counts[id(value)] = self._counts.get(id(value), 0) + 1

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, DataProto) or self._counts[id(value)] < 2:
            return value
        if id(value) not in self._refs:
            self._refs[id(value)] = ray.put(value)
        return self._refs[id(value)]
