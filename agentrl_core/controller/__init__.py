"""Worker groups: a distributed step that reads as if it were one process.

The names of ``ray_group.py`` and ``ray_pool.py`` are here too; Ray is imported when one of them is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from agentrl_core.api.errors import ConfigError
from agentrl_core.controller.decorator import Dispatch as Dispatch
from agentrl_core.controller.decorator import register as register
from agentrl_core.controller.dispatch import DispatchMode as DispatchMode
from agentrl_core.controller.local import LocalRuntime as LocalRuntime
from agentrl_core.controller.local import LocalWorkerGroup as LocalWorkerGroup
from agentrl_core.controller.runtime import ActorHandle as ActorHandle
from agentrl_core.controller.runtime import ActorOptions as ActorOptions
from agentrl_core.controller.runtime import Runtime as Runtime
from agentrl_core.controller.worker import Worker as Worker
from agentrl_core.controller.worker_group import ClassWithInitArgs as ClassWithInitArgs
from agentrl_core.controller.worker_group import WorkerGroup as WorkerGroup

if TYPE_CHECKING:
    from agentrl_core.controller.ray_group import RayWorkerGroup as RayWorkerGroup
    from agentrl_core.controller.ray_group import create_colocated_worker_cls as create_colocated_worker_cls
    from agentrl_core.controller.ray_pool import RayResourcePool as RayResourcePool


def make_runtime(
    name: str,
    *,
    num_cpus: float | None = None,
    address: str | None = None,
    cpu_threads: int | None = None,
    start_timeout: float = 600.0,
) -> Runtime:
    """The runtime ``local`` or ``ray``.

    ``cpu_threads`` bounds torch's threads in each process; None leaves this process as it is, and gives Ray's actors
    what ``OMP_NUM_THREADS`` says here, or 1.

    On Ray: ``address`` joins a cluster, otherwise one is started here with ``num_cpus`` logical CPUs (default: the
    machine's, at least 32; they count actors and may exceed the cores); its processes may take ``start_timeout``
    seconds to start. Raises ConfigError on another name, or where
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
    return RayRuntime(num_cpus=num_cpus, address=address, cpu_threads=cpu_threads, start_timeout=start_timeout)


_ON_RAY = {
    "ray_group": ("RayWorkerGroup", "create_colocated_worker_cls"),
    "ray_pool": ("RayResourcePool",),
}


def __getattr__(name: str) -> Any:
    for module, names in _ON_RAY.items():
        if name in names:
            return getattr(import_module(f"agentrl_core.controller.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
