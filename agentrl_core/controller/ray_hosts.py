"""The Ray actors in which workers live: one per rank, with a worker of each role."""

import dataclasses
import functools
import inspect
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

import ray

from agentrl_core.controller.decorator import forwarding, registrations
from agentrl_core.controller.ray_pool import RayResourcePool
from agentrl_core.controller.worker import WorkerContext, worker_context
from agentrl_core.controller.worker_group import ClassWithInitArgs


def start_hosts(
    pool: RayResourcePool,
    classes: Mapping[str, ClassWithInitArgs],
    options_of: Callable[[int], Mapping[str, Any]] = lambda rank: {},
) -> list[Any]:
    """One actor per rank of the pool, without workers yet; ``options_of`` gives more options of ``ray.remote``."""
    host_class = _host_class({role: item.cls for role, item in classes.items()})
    host = ray.remote(concurrency_groups={"watch": 1})(host_class)
    actors = []
    for rank in range(pool.world_size):
        sized = {**pool.actor_options(rank), **options_of(rank)}
        actors.append(
            host.options(**sized).remote(
                rank, pool.world_size, pool.local_rank_list[rank], pool.local_world_size_list[rank], pool.use_gpu
            )
        )
    return actors


class _Host:
    """The Ray actor of one rank: makes its workers and passes calls on to them."""

    def __init__(self, rank: int, world_size: int, local_rank: int, local_world_size: int, use_gpu: bool) -> None:
        self._context = WorkerContext(rank, world_size, local_rank, local_world_size, use_gpu=use_gpu)
        self._workers: dict[str, Any] = {}

    @ray.method(concurrency_group="watch")  # type: ignore[untyped-decorator]  # Ray has no type for it
    def ping(self) -> None:
        """Answer while this process moves, also in the middle of a long call: pings have their own thread."""

    def describe(self) -> tuple[int, str, list[str], Any]:
        """World size, this node's address, the roles, and the placement group."""
        group = ray.util.get_current_placement_group()
        return self._context.world_size, ray.util.get_node_ip_address(), list(self._workers), group

    def free_address(self) -> tuple[str, int]:
        """This node's address and a port that is free on it."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def gpus(self) -> tuple[str, tuple[str, ...]]:
        """Ray's name of this node, and the GPUs that this process was given."""
        context = ray.get_runtime_context()
        return context.get_node_id(), tuple(context.get_accelerator_ids().get("GPU", ()))

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

    def keep(self, role: str, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Runs a method of a role's worker; on rank 0 a reference to its result, which stays here."""
        result = getattr(self._workers[role], method)(*args, **kwargs)
        return [] if self._context.rank else [ray.put(result)]


class _AsyncHost(_Host):
    """The host of workers with async methods: calls of those may overlap."""

    async def call(self, role: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Runs a method of a role's worker, and awaits what it returns where that can be awaited."""
        result = getattr(self._workers[role], method)(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result


def _host_class(classes: Mapping[str, type]) -> type:
    """The host with a method for each registered one of its roles: naming them in arguments costs a tenth of a call."""
    is_async = any(has_async_methods(cls) for cls in classes.values())
    routes = {
        route_name(role, method): _forward(role, method, is_async)
        for role, cls in classes.items()
        for method in registrations(cls)
    }
    base = _AsyncHost if is_async else _Host
    return type(f"Host_{'_'.join(classes)}", (base,), routes)


def route_name(role: str, method: str) -> str:
    """The host's own method for a registered one of a role."""
    return f"{role}__{method}"


def _forward(role: str, method: str, is_async: bool) -> Any:
    return forwarding(lambda host: functools.partial(host.call, role, method), is_async)


def has_async_methods(cls: type) -> bool:
    """Calls of such a class may overlap."""
    members = (inspect.getattr_static(cls, name) for name in dir(cls))
    return any(inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member) for member in members)
