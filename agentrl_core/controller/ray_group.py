"""Worker groups on Ray."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import remove_placement_group

from agentrl_core.api.errors import WorkerError
from agentrl_core.controller.dispatch import Call
from agentrl_core.controller.ray_failures import Watch, fetch
from agentrl_core.controller.ray_hosts import NAMESPACE, route_name, start_hosts
from agentrl_core.controller.ray_pool import RayResourcePool
from agentrl_core.controller.worker_group import ClassWithInitArgs, Fetch, Place, WorkerGroup
from agentrl_core.protocol import DataProto


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class with its arguments, and the Ray options of its actors."""

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        super().__init__(cls, *args, **kwargs)
        self.options: dict[str, Any] = {}

    def update_options(self, **options: Any) -> None:
        """Sets options of ``ray.remote`` for the actors, such as ``runtime_env`` or ``num_cpus``."""
        self.options.update(options)


class ColocatedClasses(RayClassWithInitArgs):
    """Several worker classes by role, for one process per rank."""

    def __init__(self, class_dict: Mapping[str, ClassWithInitArgs]) -> None:
        super().__init__(object)
        self.class_dict = dict(class_dict)


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> ColocatedClasses:
    """What a `RayWorkerGroup` makes one process per rank of, with a worker of every role; `RayWorkerGroup.spawn`
    gives the groups of the roles.
    """
    return ColocatedClasses(class_dict)


class RayWorkerGroup(WorkerGroup):
    """One Ray actor per rank of a resource pool, with one worker of the class in it, or several colocated ones.

    An exception of a rank is raised as WorkerError with the first root traceback, its cause being the original
    exception; a dead worker as WorkerError that names role, rank, node, exit cause and the method that it was in.
    A `Watch` looks after the processes: once one has died, the others are ended, and calls under way and later ones
    raise that. With ``owns_pool`` the pool is closed with the group. With ``detached_name`` the actors outlive this
    driver until a group that owns them is closed; `from_detached` finds them.
    """

    nodes: Sequence[str] = ()
    resource_pool: RayResourcePool | None = None
    _owned_pool: RayResourcePool | None = None
    _owns_actors = False
    _num_cpus = 0.0
    _placement_groups: Sequence[Any] = ()
    _watch: Watch | None = None

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: ClassWithInitArgs,
        role: str = "",
        owns_pool: bool = False,
        detached_name: str = "",
    ) -> None:
        if detached_name and not resource_pool.detached:
            raise WorkerError(f"the detached group {detached_name!r} needs a pool made with detached=True")
        role = role or ray_cls_with_init.cls.__name__
        classes = {role: ray_cls_with_init}
        if isinstance(ray_cls_with_init, ColocatedClasses):
            classes = ray_cls_with_init.class_dict
        actors = start_hosts(resource_pool, classes, detached_name)
        self._attach(ray_cls_with_init.cls, role, actors, {name: item.cls for name, item in classes.items()})
        self.resource_pool = resource_pool
        self._owns_actors = True
        self._owned_pool = resource_pool if owns_pool else None
        self._num_cpus = resource_pool.num_cpus
        ranks = range(self.world_size)
        try:
            places = self._fetcher("place", ranks)([actor.place.remote() for actor in actors])
            self.nodes = [address for address, _ in places]
            self._watch = Watch(role, actors, self.nodes)
            for name, item in classes.items():
                plain = ray.put(ClassWithInitArgs(item.cls, *item.args, **item.kwargs))
                built = [actor.build.remote(name, plain, *places[0]) for actor in actors]
                self._watch.last_calls = [f"{name}.__init__"] * len(actors)
                self._fetcher(f"{name}.__init__", ranks)(built)
        except WorkerError:
            self.close()
            raise

    def _attach(self, cls: type, role: str, actors: list[Any], roles: Mapping[str, type]) -> None:
        WorkerGroup.__init__(self, cls, role, len(actors))
        self._roles = dict(roles)
        self._actors = actors

    @classmethod
    def from_detached(cls, name: str, classes: Mapping[str, type], owns_actors: bool = False) -> "RayWorkerGroup":
        """The group over actors that some driver of this cluster started with ``detached_name``.

        ``classes`` maps the roles in them to their classes; with several use `spawn`. Closing the group ends nothing
        unless it ``owns_actors``; then it gives the placement groups back too.
        """
        try:
            first = ray.get_actor(f"{name}/0", namespace=NAMESPACE)
            size = ray.get(first.describe.remote())[0]
            actors = [first, *(ray.get_actor(f"{name}/{rank}", namespace=NAMESPACE) for rank in range(1, size))]
            facts = ray.get([actor.describe.remote() for actor in actors])
        except (ValueError, RayActorError) as error:
            raise WorkerError(f"there is no detached worker group {name!r} in this cluster: {error}") from error
        if unknown := sorted(classes.keys() - set(facts[0][2])):
            raise WorkerError(f"the detached worker group {name!r} has the roles {facts[0][2]}, not {unknown}")
        group = cls.__new__(cls)
        role, worker = next(iter(classes.items())) if len(classes) == 1 else (name, object)
        group._attach(worker, role, actors, classes)
        group.nodes = [node for _, node, _, _ in facts]
        group._owns_actors = owns_actors
        group._placement_groups = [placed for *_, placed in facts if placed is not None]
        group._watch = Watch(role, actors, group.nodes)
        return group

    def spawn(self, prefix_set: Iterable[str]) -> "dict[str, RayWorkerGroup]":
        """A group for each of these roles of a colocated group, over the same processes.

        Closing one of them ends nothing; this group owns the processes.
        """
        groups = {}
        for role in prefix_set:
            if role not in self._roles:
                raise WorkerError(f"{self.role!r} has no role {role!r}; it has {sorted(self._roles)}")
            group = RayWorkerGroup.__new__(RayWorkerGroup)
            group._attach(self._roles[role], role, self._actors, {role: self._roles[role]})
            group.nodes, group.resource_pool, group._watch = self.nodes, self.resource_pool, self._watch
            group._num_cpus, group.auto_padding = self._num_cpus, self.auto_padding
            groups[role] = group
        return groups

    def _submit(self, method: str, calls: Sequence[Call | None]) -> list[Any]:
        if not self._actors:
            raise WorkerError(f"{self.role}.{method}: the worker group is closed")
        if self._watch is not None:
            self._watch.raise_if_dead()
        put = _PutOnce(calls)
        handles = []
        for rank, (actor, call) in enumerate(zip(self._actors, calls, strict=True)):
            if call is not None:
                if self._watch is not None:
                    self._watch.last_calls[rank] = f"{self.role}.{method}"
                args, kwargs = map(put, call[0]), {name: put(value) for name, value in call[1].items()}
                route = getattr(actor, route_name(self.role, method), None)
                if route is None:
                    handles.append(actor.call.remote(self.role, method, *args, **kwargs))
                else:
                    handles.append(route.remote(*args, **kwargs))
        return handles

    def _fetcher(self, method: str, ranks: Sequence[int]) -> Fetch:
        where = [f" on node {node}" for node in self.nodes] or [""] * self.world_size
        labels = [f"rank {rank} of {self.world_size} of {self.role!r}{where[rank]}" for rank in ranks]
        return functools.partial(fetch, method, labels, self._watch)

    def places(self) -> list[Place]:
        """See :meth:`WorkerGroup.places`."""
        found = self._fetcher("gpus", range(self.world_size))([actor.gpus.remote() for actor in self._actors])
        return [Place(node, devices) for node, devices in found]

    @property
    def num_cpus(self) -> float:
        """The CPUs that the group's own actors hold."""
        return self._num_cpus * len(self._actors) if self._owns_actors else 0.0

    @property
    def num_gpus(self) -> float:
        """The GPUs that the group's own actors hold."""
        pool = self.resource_pool
        return pool.num_gpus * len(self._actors) if self._owns_actors and pool is not None else 0.0

    def close(self) -> None:
        """Kills the actors that this group started, and gives the pool back if it owns it."""
        actors, self._actors = self._actors, []
        if self._owns_actors:
            if self._watch is not None:
                self._watch.stop()
            for actor in actors:
                ray.kill(actor)
            for group in dict.fromkeys(self._placement_groups):
                remove_placement_group(group)
        if self._owned_pool is not None:
            self._owned_pool.close()


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
