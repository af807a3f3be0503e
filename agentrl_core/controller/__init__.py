"""Worker groups: a distributed step that reads as if it were one process.

The names of ``ray_group.py`` are here too; Ray is imported when one of them is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from agentrl_core.api.errors import ConfigError
from agentrl_core.controller.decorator import (
    Dispatch,
    Execute,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from agentrl_core.controller.dispatch import DispatchMode, make_nd_compute_dataproto_dispatch_fn
from agentrl_core.controller.fused import FusedWorker, create_fused_worker_cls
from agentrl_core.controller.local import LocalRuntime, LocalWorkerGroup
from agentrl_core.controller.resource_pool import (
    RayResourcePool,
    ResourcePool,
    ResourcePoolManager,
    merge_resource_pool,
    split_resource_pool,
)
from agentrl_core.controller.runtime import ActorHandle, ActorOptions, Runtime
from agentrl_core.controller.worker import Worker
from agentrl_core.controller.worker_group import ClassWithInitArgs, WorkerGroup

if TYPE_CHECKING:
    from agentrl_core.controller.ray_group import RayClassWithInitArgs, RayWorkerGroup, create_colocated_worker_cls

__all__ = [
    "ActorHandle",
    "ActorOptions",
    "ClassWithInitArgs",
    "Dispatch",
    "DispatchMode",
    "Execute",
    "FusedWorker",
    "LocalRuntime",
    "LocalWorkerGroup",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePool",
    "ResourcePoolManager",
    "Runtime",
    "Worker",
    "WorkerGroup",
    "create_colocated_worker_cls",
    "create_fused_worker_cls",
    "make_nd_compute_dataproto_dispatch_fn",
    "make_runtime",
    "merge_resource_pool",
    "register",
    "register_dispatch_mode",
    "split_resource_pool",
    "update_dispatch_mode",
]


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


def __getattr__(name: str) -> Any:
    if name in {"RayClassWithInitArgs", "RayWorkerGroup", "create_colocated_worker_cls"}:
        return getattr(import_module("agentrl_core.controller.ray_group"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
