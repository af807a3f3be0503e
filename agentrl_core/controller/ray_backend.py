"""Worker groups and actors on Ray. Only this module and ray_placement.py import Ray; its untyped edges end here."""

import asyncio
import dataclasses
import functools
import inspect
import logging
import os
import re
import socket
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, Self, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from agentrl_core.api.errors import AgentRLError, ConfigError, WorkerError
from agentrl_core.controller import ray_placement
from agentrl_core.controller.decorator import registrations
from agentrl_core.controller.dispatch import Call
from agentrl_core.controller.event_loop import EventLoop
from agentrl_core.controller.ray_watch import Watch
from agentrl_core.controller.resource_pool import RayResourcePool
from agentrl_core.controller.worker import WorkerContext, worker_context
from agentrl_core.controller.worker_group import ClassWithInitArgs, Fetch, WorkerGroup
from agentrl_core.protocol import DataProto

T = TypeVar("T")

# After one rank has failed, the others get this long to fail too, so that the message can name them.
OTHERS_GRACE_SECONDS = 1.0
# Logical CPUs only count actors, most of which wait: a laptop's two cores must hold all actors of a small run.
MIN_LOGICAL_CPUS = 32
# Detached actors are found by name in it, whatever namespace the driver has.
NAMESPACE = "agentrl"
ANSI_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class with its arguments, and the Ray options of its actors."""

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        super().__init__(cls, *args, **kwargs)
        self.options: dict[str, Any] = {}

    def update_options(self, **options: Any) -> None:
        """Sets options of ``ray.remote`` for the actors, such as ``runtime_env`` or ``num_cpus``."""
        self.options.update(options)


class _Host:
    """The Ray actor of one rank: makes its workers and passes calls on to them."""

    def __init__(self, rank: int, world_size: int, local_rank: int, local_world_size: int, use_gpu: bool) -> None:
        self._context = WorkerContext(rank, world_size, local_rank, local_world_size, use_gpu=use_gpu)
        self._workers: dict[str, Any] = {}

    def ping(self) -> None:
        """Answers when the calls before it are done."""

    def describe(self) -> tuple[int, str, list[str], Any]:
        """World size, this node's address, the roles, and the placement group."""
        group = ray.util.get_current_placement_group()
        return self._context.world_size, ray.util.get_node_ip_address(), list(self._workers), group

    def place(self) -> tuple[str, int]:
        """This node's address and a port that is free on it."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def build(self, role: str, cls_with_init: ClassWithInitArgs, master_addr: str, master_port: int) -> None:
        """Makes the worker of a role."""
        context = dataclasses.replace(self._context, master_addr=master_addr, master_port=master_port)
        # What torch.distributed's env:// initialisation reads.
        os.environ.update(
            RANK=str(context.rank),
            WORLD_SIZE=str(context.world_size),
            LOCAL_RANK=str(context.local_rank),
            MASTER_ADDR=master_addr,
            MASTER_PORT=str(master_port),
        )
        with worker_context(context):
            self._workers[role] = cls_with_init()

    def call(self, role: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Runs a method of a role's worker."""
        return getattr(self._workers[role], method)(*args, **kwargs)


class _AsyncHost(_Host):
    """The host of workers with async methods: calls of those may overlap."""

    async def call(self, role: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Runs a method of a role's worker, and awaits what it returns where that can be awaited."""
        result = getattr(self._workers[role], method)(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result


def _host_class(classes: Mapping[str, type]) -> type:
    """The host with a method for each registered one of its roles: naming them in arguments costs a tenth of a call."""
    is_async = any(_has_async_methods(cls) for cls in classes.values())
    forward = _forward_async if is_async else _forward
    routes = {
        _route(role, method): forward(role, method) for role, cls in classes.items() for method in registrations(cls)
    }
    base = _AsyncHost if is_async else _Host
    return type(f"Host_{'_'.join(classes)}", (base,), routes)


def _route(role: str, method: str) -> str:
    return f"{role}__{method}"


def _forward(role: str, method: str) -> Any:
    def call(self: _Host, *args: Any, **kwargs: Any) -> Any:
        return self.call(role, method, *args, **kwargs)

    return call


def _forward_async(role: str, method: str) -> Any:
    async def call(self: _AsyncHost, *args: Any, **kwargs: Any) -> Any:
        return await self.call(role, method, *args, **kwargs)

    return call


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

    nodes: list[str]
    resource_pool: RayResourcePool | None
    _owned_pool: RayResourcePool | None
    _placement_groups: list[Any]
    _watch: Watch | None

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
        actors = _start_hosts(resource_pool, classes, detached_name)
        self._attach(ray_cls_with_init.cls, role, actors, {name: item.cls for name, item in classes.items()})
        self.resource_pool = resource_pool
        self._owns_actors = True
        self._owned_pool = resource_pool if owns_pool else None
        self._num_cpus = resource_pool.num_cpus
        ranks = range(self.world_size)
        try:
            places = self._fetcher("place", ranks)([actor.place.remote() for actor in actors])
            self.nodes = [address for address, _ in places]
            for name, item in classes.items():
                plain = ray.put(ClassWithInitArgs(item.cls, *item.args, **item.kwargs))
                built = [actor.build.remote(name, plain, *places[0]) for actor in actors]
                self._fetcher(f"{name}.__init__", ranks)(built)
        except WorkerError:
            self.close()
            raise
        self._watch = Watch(role, actors, self.nodes)

    def _attach(self, cls: type, role: str, actors: list[Any], roles: Mapping[str, type]) -> None:
        WorkerGroup.__init__(self, cls, role, len(actors))
        self._roles = dict(roles)
        self._actors = actors
        self.nodes = []
        self.resource_pool = None
        self._owned_pool = None
        self._owns_actors = False
        self._num_cpus = 0.0
        self._placement_groups = []
        self._watch = None

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
                route = getattr(actor, _route(self.role, method), None)
                if route is None:
                    handles.append(actor.call.remote(self.role, method, *args, **kwargs))
                else:
                    handles.append(route.remote(*args, **kwargs))
        return handles

    def _fetcher(self, method: str, ranks: Sequence[int]) -> Fetch:
        where = [f" on node {node}" for node in self.nodes] or [""] * self.world_size
        labels = [f"rank {rank} of {self.world_size} of {self.role!r}{where[rank]}" for rank in ranks]
        return functools.partial(_fetch, method, labels, self._watch)

    @property
    def num_cpus(self) -> float:
        """The CPUs that the group's own actors hold."""
        return self._num_cpus * len(self._actors) if self._owns_actors else 0.0

    def close(self) -> None:
        """Kills the actors that this group started, and gives the pool back if it owns it."""
        actors, self._actors = self._actors, []
        if self._owns_actors:
            if self._watch is not None:
                self._watch.stop()
            for actor in actors:
                ray.kill(actor)
            ray_placement.remove_placement_groups(list(dict.fromkeys(self._placement_groups)))
        if self._owned_pool is not None:
            self._owned_pool.close()


def _start_hosts(pool: RayResourcePool, classes: Mapping[str, ClassWithInitArgs], detached_name: str) -> list[Any]:
    host = ray.remote(_host_class({role: item.cls for role, item in classes.items()}))
    options: dict[str, Any] = {"runtime_env": _runtime_env()}
    for item in classes.values():
        options.update(getattr(item, "options", {}))
    actors = []
    for rank in range(pool.world_size):
        sized = {**pool.actor_options(rank), **options}
        if detached_name:
            sized |= {"name": f"{detached_name}/{rank}", "namespace": NAMESPACE, "lifetime": "detached"}
        actors.append(
            host.options(**sized).remote(
                rank, pool.world_size, pool.local_rank_list[rank], pool.local_world_size_list[rank], pool.use_gpu
            )
        )
    return actors


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


def _fetch(method: str, labels: Sequence[str], watch: Watch | None, handles: Sequence[Any]) -> list[Any]:
    """The values of all handles; raises the first failure as soon as there is one."""
    try:
        return list(ray.get(list(handles)))
    except Exception as error:  # noqa: BLE001 - Ray raises the task's own exception class
        if isinstance(error, RayActorError) and watch is not None:
            # This rank may have been ended only because another one, whose death is the news, was waited for.
            watch.raise_if_dead()
        raise _group_error(method, labels, handles, error) from _root(error)


def _group_error(method: str, labels: Sequence[str], handles: Sequence[Any], error: BaseException) -> WorkerError:
    done, _ = ray.wait(list(handles), num_returns=len(handles), timeout=OTHERS_GRACE_SECONDS, fetch_local=False)
    failures = {}
    for label, handle in zip(labels, handles, strict=True):
        if handle in done:
            try:
                ray.get(handle, timeout=0)
            except GetTimeoutError:
                continue
            except Exception as failure:  # noqa: BLE001 - Ray raises the task's own exception class
                failures[label] = failure
    same = [label for label, failure in failures.items() if repr(failure) == repr(error)]
    first = next(iter(same or failures), labels[0])
    others = [label for label in failures if label != first]
    also = f"\nAlso failed: {', '.join(others)}" if others else ""
    return WorkerError(_told(f"{first}, in {method!r}", error) + also)


def _told(who: str, error: BaseException) -> str:
    if isinstance(error, RayActorError):
        return f"{who}: the worker process died or cannot be reached. {str(error).strip()}"
    if isinstance(error, RayTaskError):
        return f"{who}: {type(_root(error)).__name__}\n{ANSI_COLOURS.sub('', str(error)).strip()}"
    return f"{who}: {type(error).__name__}: {error}"


def _root(error: BaseException) -> BaseException:
    """The exception that the remote code raised."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException) and error.cause is not error:
        error = error.cause
    return error


class RayActorHandle:
    """An actor of a plain class on Ray. Handles can be pickled and passed to other actors."""

    def __init__(self, name: str, actor: Any, num_cpus: float) -> None:
        self._name = name
        self._actor = actor
        self.num_cpus = num_cpus

    @property
    def name(self) -> str:
        """The actor's name."""
        return self._name

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method from any event loop; cancelling the call cancels an async method over there."""
        reference = getattr(self._actor, method).remote(*args, **kwargs)
        try:
            return await reference
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except Exception as error:  # noqa: BLE001 - Ray raises the task's own exception class
            root = _root(error)
            if isinstance(root, AgentRLError):
                raise root from error
            raise WorkerError(_told(f"actor {self._name!r}, in {method!r}", error)) from root

    def kill(self) -> None:
        """Ends the actor's process."""
        ray.kill(self._actor)
        self.num_cpus = 0.0


class RayRuntime:
    """Worker groups and actors on a Ray cluster.

    Uses the Ray that is initialised in this process, and then leaves it running; otherwise joins the cluster at
    ``address``, or starts one here.
    """

    def __init__(
        self,
        num_cpus: float | None = None,
        address: str | None = None,
        cpu_threads: int | None = None,
        auto_padding: bool = False,
    ) -> None:
        self._auto_padding = auto_padding
        self._loop = EventLoop()
        self._groups: list[RayWorkerGroup] = []
        self._actors: list[RayActorHandle] = []
        self._is_open = True
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            cpus = num_cpus or max(os.cpu_count() or 1, MIN_LOGICAL_CPUS)
            start = {"address": address} if address else {"num_cpus": cpus, "include_dashboard": False}
            try:
                ray.init(**start, runtime_env=_threads(cpu_threads), logging_level=logging.ERROR)
            except (ConnectionError, RuntimeError, ValueError) as error:
                aim = f"reached at {address}" if address else "started"
                raise ConfigError(f"cluster: Ray cannot be {aim}: {error}") from error

    def worker_group(
        self,
        cls: ClassWithInitArgs,
        name: str,
        world_size: int = 1,
        num_gpus: float = 0.0,
        max_colocate_count: int = 1,
    ) -> RayWorkerGroup:
        """One actor with one CPU for every rank. Raises WorkerError if the cluster is too small.

        With ``max_colocate_count`` n each has an n-th of it and of ``num_gpus``: room for actors ``beside`` it.
        """
        self._check_cpus(name, world_size)
        pool = RayResourcePool(
            [world_size], num_gpus, max_colocate_count=max_colocate_count, strategy="PACK", name_prefix=name
        )
        group = RayWorkerGroup(pool, cls, role=name, owns_pool=True)
        group.auto_padding = self._auto_padding
        self._groups.append(group)
        return group

    def colocated_worker_groups(
        self, classes: Mapping[str, ClassWithInitArgs], nodes: int = 1, processes_per_node: int = 1, num_gpus: float = 0
    ) -> dict[str, RayWorkerGroup]:
        """One actor with one CPU for every rank, with a worker of every role in it.

        Raises WorkerError if the cluster is too small.
        """
        name = "+".join(classes)
        self._check_cpus(name, nodes * processes_per_node)
        # Processes of one node must be on one node: they share its GPUs, and rank order follows the nodes.
        pool = RayResourcePool([processes_per_node] * nodes, num_gpus=num_gpus, name_prefix=name)
        group = RayWorkerGroup(pool, create_colocated_worker_cls(classes), role=name, owns_pool=True)
        self._groups.append(group)
        return group.spawn(classes)

    def actor(
        self,
        cls: type,
        *args: Any,
        name: str,
        num_cpus: float = 1,
        num_gpus: float = 0.0,
        python: str | None = None,
        max_concurrency: int = 1000,
        beside: tuple[WorkerGroup, int] | None = None,
        **kwargs: Any,
    ) -> RayActorHandle:
        """An actor, under ``python`` where given: an environment with this Ray and this Python's minor version.

        ``beside`` (a group and a rank) puts it into that rank's bundle, with a share of its CPUs and GPUs in place of
        ``num_cpus`` and ``num_gpus``. Raises WorkerError if the cluster is too small.
        """
        if beside is not None:
            placed, num_cpus = _beside(name, *beside), 0.0
        else:
            self._check_cpus(name, num_cpus)
            # Over the nodes, where there are several.
            placed = {"num_cpus": num_cpus, "num_gpus": num_gpus, "scheduling_strategy": "SPREAD"}
        options: dict[str, Any] = {**placed, "runtime_env": _runtime_env(python)}
        if _has_async_methods(cls):
            options["max_concurrency"] = max_concurrency
        handle = RayActorHandle(name, ray.remote(cls).options(**options).remote(*args, **kwargs), num_cpus)
        self._actors.append(handle)
        return handle

    def _check_cpus(self, name: str, wanted: float) -> None:
        # Ray would let what finds no room wait for ever.
        taken = sum(actor.num_cpus for actor in self._actors) + sum(group.num_cpus for group in self._groups)
        seen = ray.cluster_resources().get("CPU", 0.0)
        if taken + wanted > seen:
            raise WorkerError(
                f"{name!r} needs {wanted:g} logical CPUs, but {taken:g} of the {seen:g} that the Ray cluster has are "
                f"taken by this run: set cluster.num_cpus to {taken + wanted:g} or more (logical CPUs may exceed cores)"
            )

    def share(self, value: Any) -> Any:
        """The value in Ray's object store."""
        return ray.put(value)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on this process's event loop."""
        return self._loop.run(coroutine)

    def shutdown(self) -> None:
        """Ends groups and actors, and Ray too if this runtime started or joined it."""
        if not self._is_open:
            return
        self._is_open = False
        self._loop.close()
        if ray.is_initialized():
            for group in self._groups:
                group.close()
            for actor in self._actors:
                actor.kill()
            if self._owns_ray:
                ray.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()


def _beside(name: str, group: WorkerGroup, rank: int) -> dict[str, Any]:
    pool = getattr(group, "resource_pool", None)
    if pool is None or pool.max_colocate_count < 2:
        raise WorkerError(
            f"actor {name!r} has no room beside rank {rank} of {group.role!r}: "
            "make that group with max_colocate_count of at least 2"
        )
    options: dict[str, Any] = pool.actor_options(rank)
    return options


def _has_async_methods(cls: type) -> bool:
    members = (inspect.getattr_static(cls, name) for name in dir(cls))
    return any(inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member) for member in members)


def _threads(cpu_threads: int | None) -> dict[str, Any]:
    """One OpenMP thread per process, as many share a node, unless the user says otherwise."""
    threads = os.environ.get("OMP_NUM_THREADS", "1") if cpu_threads is None else str(cpu_threads)
    return {"env_vars": {"OMP_NUM_THREADS": threads}}


def _runtime_env(python: str | None = None) -> dict[str, Any]:
    return {"py_executable": python} if python else {}
