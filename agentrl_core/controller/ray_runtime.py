"""Worker groups and actors of a run on a Ray cluster."""

import asyncio
import gc
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from typing import Any

import ray
from ray._private import ray_constants
from ray._private.ray_logging import global_worker_stdstream_dispatcher
from ray._private.worker import print_to_stdstream
from ray.exceptions import AuthenticationError, GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from agentrl_core.api.errors import AgentRLError, ConfigError, WorkerError
from agentrl_core.controller.ray_failures import describe, kill, root_cause
from agentrl_core.controller.ray_group import RayGroup, RayWorkerGroup, create_colocated_worker_cls
from agentrl_core.controller.ray_hosts import has_async_methods
from agentrl_core.controller.ray_pool import RayResourcePool
from agentrl_core.controller.ray_start import environment, missing_token, patient_start
from agentrl_core.controller.runtime import ActorDiedError, ActorOptions, Runtime
from agentrl_core.controller.worker_group import ClassWithInitArgs
from agentrl_core.plugins.boundary import wait_reported

# Logical CPUs only count actors, most of which wait: a laptop's two cores must hold all actors of a small run.
MIN_LOGICAL_CPUS = 32
LOOPBACK = "127.0.0.1"
FETCH_SECONDS = 600.0
"""For a value to come from another node."""
LOOK_SECONDS = 120.0
"""For a process to start on a node and to look for a file."""
ENGINE_SERVER = "EngineServer"
_OF_RAY = ("raylet", "gcs_server")


class RayActorHandle:
    """An actor of a plain class on Ray. Handles can be pickled and passed to other actors."""

    def __init__(self, name: str, actor: Any, num_cpus: float, num_gpus: float) -> None:
        self.name = name
        self._actor = actor
        self.num_cpus = num_cpus
        self.num_gpus = num_gpus
        self._was_killed = False

    def __reduce__(self) -> tuple[Any, ...]:
        # As bytes: Ray warns of handles that are arguments of actors with restarts, as if they could be lost.
        return _handle, (self.name, pickle.dumps(self._actor), self.num_cpus, self.num_gpus)

    def __eq__(self, other: object) -> bool:
        # A handle that has been passed to another process and back is another object.
        return isinstance(other, RayActorHandle) and bool(self._actor == other._actor)

    def __hash__(self) -> int:
        return hash(self._actor)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method from any event loop; cancelling the call cancels an async method over there."""
        return await self._result(method, self._begun(method, 1, args, kwargs))

    async def call_keeping(self, method: str, *args: Any) -> tuple[Any, "RayKept"]:
        """As :meth:`call`. This process owns the second value: it outlives the actor, and is lost with its node."""
        first, second = self._begun(method, 2, args, {})
        return await self._result(method, first), RayKept(second)

    def _begun(self, method: str, results: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._was_killed:
            # Ray may still carry out what comes shortly after a kill.
            raise WorkerError(f"actor {self.name!r}, in {method!r}: it was killed")
        return getattr(self._actor, method).options(max_task_retries=0, num_returns=results).remote(*args, **kwargs)

    async def _result(self, method: str, reference: Any) -> Any:
        try:
            return await reference
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except Exception as error:  # noqa: BLE001 - Ray raises the task's own exception class
            root = root_cause(error)
            if isinstance(root, AgentRLError):
                raise root from error
            kind = ActorDiedError if isinstance(error, RayActorError) else WorkerError
            raise kind(describe(f"actor {self.name!r}, in {method!r}", error)) from root

    def kill(self) -> None:
        """Ends the actor's process."""
        self._was_killed = True
        kill(self._actor)
        self.num_cpus = self.num_gpus = 0.0

    def restart(self) -> None:
        """Kills the actor's process; Ray starts a new one if the actor has restarts left."""
        kill(self._actor, restart=True)


class RayKept:
    """A value in Ray's object store."""

    def __init__(self, reference: Any) -> None:
        self._reference = reference

    def get(self) -> Any:
        """See :meth:`Kept.get`."""
        try:
            return ray.get(self._reference, timeout=FETCH_SECONDS)
        except (RayError, TimeoutError) as error:
            raise WorkerError(f"it is lost with the node that kept it: {type(error).__name__}: {error}") from error


def _handle(name: str, actor: bytes, num_cpus: float, num_gpus: float) -> RayActorHandle:
    return RayActorHandle(name, pickle.loads(actor), num_cpus, num_gpus)


def _watch_ray(processes: Mapping[str, Any], report: Callable[[str], None], is_open: Callable[[], bool]) -> None:
    # Often: within about a second after the raylet's death Ray ends this process without a word to Python.
    while is_open():
        if dead := [name for name, process in processes.items() if process.poll() is not None]:
            report(f"Ray's {dead[0]} died")
            return
        time.sleep(0.1)


class RayRuntime(Runtime):
    """Worker groups and actors on a Ray cluster.

    Uses the Ray that is initialised in this process, and then leaves it running; otherwise joins the cluster at
    ``address``, or starts one here.
    """

    def __init__(
        self,
        num_cpus: float | None = None,
        address: str | None = None,
        cpu_threads: int | None = None,
        start_timeout: float = 600.0,
    ) -> None:
        super().__init__()
        self._groups: list[RayWorkerGroup] = []
        self._actors: list[RayActorHandle] = []
        # Interpreters that have been found, with the nodes that have them.
        self._found: set[tuple[str, str]] = set()
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            cpus = num_cpus or max(os.cpu_count() or 1, MIN_LOGICAL_CPUS)
            start: dict[str, Any] = {"address": address}
            if not address:
                start = {"num_cpus": cpus, "include_dashboard": False, "_node_ip_address": LOOPBACK}
            if not address or address.startswith(LOOPBACK):
                # Nothing outside this machine may reach a cluster of one machine. Ray does so by itself on other
                # systems than Linux; there it has no public switch, and turns 127.0.0.1 into the host's address.
                ray_constants.ENABLE_RAY_CLUSTER = False
            try:
                # A cluster that is there answers soon, and the patience would apply to one that refuses too.
                with nullcontext() if address else patient_start(start_timeout), wait_reported("Ray to start"):
                    ray.init(**start, runtime_env=environment(cpu_threads), logging_level=logging.ERROR)
            except (ConnectionError, RuntimeError, ValueError, AuthenticationError) as error:
                aim = f"reached at {address}" if address else "started"
                raise ConfigError(f"cluster: Ray cannot be {aim}: {error}{missing_token(error)}") from error
            except Exception as error:  # noqa: BLE001 - Ray raises this class where its node is not up in time
                raise WorkerError(
                    f"Ray cannot be started within {start_timeout:g} s (rollout.engine.start_timeout): {error} Try "
                    "again when the machine is less busy"
                ) from error
            global_worker_stdstream_dispatcher.remove_handler("ray_print_logs")
            global_worker_stdstream_dispatcher.add_handler("ray_print_logs", _show_output)

    def when_lost(self, report: Callable[[str], None]) -> None:
        """See :meth:`Runtime.when_lost`. A Ray that this process did not start is not watched."""
        if self._owns_ray and (node := ray._private.worker._global_node) is not None:
            processes = {name: node.all_processes[name][0].process for name in _OF_RAY if name in node.all_processes}
            arguments = (processes, report, lambda: self._is_open)
            threading.Thread(target=_watch_ray, args=arguments, name="agentrl-ray-watch", daemon=True).start()

    def worker_group(
        self, cls: ClassWithInitArgs, name: str, world_size: int = 1, num_gpus: float = 0.0
    ) -> RayWorkerGroup:
        """One actor with one CPU for every rank. Raises WorkerError if the cluster is too small."""
        self._check_cpus(name, world_size)
        pool = RayResourcePool([world_size], num_gpus, strategy="PACK", name_prefix=name)
        group = RayWorkerGroup(pool, cls, role=name, owns_pool=True)
        self._groups.append(group)
        return group

    def colocated_worker_groups(
        self, classes: Mapping[str, ClassWithInitArgs], nodes: int = 1, processes_per_node: int = 1,
        num_gpus: float = 0, python: str | None = None,
    ) -> dict[str, RayGroup]:  # fmt: skip
        """One actor with one CPU for every rank, with a worker of every role in it.

        Raises WorkerError if the cluster is too small.
        """
        name = "+".join(classes)
        self._check_cpus(name, nodes * processes_per_node)
        if python is not None:
            self._check_python(name, python, ActorOptions(num_gpus=num_gpus))
        # Processes of one node must be on one node: they share its GPUs, and rank order follows the nodes.
        pool = RayResourcePool([processes_per_node] * nodes, num_gpus=num_gpus, name_prefix=name)
        group = RayWorkerGroup(pool, create_colocated_worker_cls(classes), role=name, owns_pool=True, python=python)
        self._groups.append(group)
        return group.spawn(classes)

    def _actor(self, name: str, options: ActorOptions, cls: ClassWithInitArgs) -> RayActorHandle:
        # ``options.python`` must be an environment with this Ray and this Python's minor version.
        self._check_cpus(name, options.num_cpus)
        self._check_gpus(name, options.num_gpus)
        node, python, restarts = options.node, options.python, options.restarts
        if python is not None:
            self._check_python(name, python, options)
        remote: dict[str, Any] = {
            "num_cpus": options.num_cpus,
            "num_gpus": options.num_gpus,
            # Over the nodes, where there are several.
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False) if node else "SPREAD",
            "runtime_env": {"py_executable": python} if python else {},
            "max_restarts": restarts,
            # Or calls would fail instead of waiting for the new process; each call says itself that it is not repeated.
            "max_task_retries": -1 if restarts else 0,
        }
        if has_async_methods(cls.cls):
            remote["max_concurrency"] = options.max_concurrency
        actor = ray.remote(cls.cls).options(**remote).remote(*cls.args, **cls.kwargs)
        self._actors.append(RayActorHandle(name, actor, options.num_cpus, options.num_gpus))
        return self._actors[-1]

    def _check_python(self, name: str, python: str, options: ActorOptions) -> None:
        """Refuse an interpreter that a node lacks: Ray would try to start it for ever. This process has looked here."""
        here = ray.get_runtime_context().get_node_id()
        for node in ray.nodes():
            place = node["NodeID"], python
            possible = options.node in ("", node["NodeID"]) and (node["Resources"].get("GPU") or not options.num_gpus)
            if not node["Alive"] or node["NodeID"] == here or not possible or place in self._found:
                continue
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            look = ray.remote(num_cpus=0)(os.path.isfile).options(scheduling_strategy=there)
            # A node that is so slow says by itself later what is wrong.
            with suppress(GetTimeoutError):
                if not ray.get(look.remote(python), timeout=LOOK_SECONDS):
                    raise ConfigError(
                        f"{name!r} is to run under {python}, which is not on node {node['NodeManagerHostname']} "
                        f"({node['NodeManagerAddress']}): every node that it may be on needs this environment there"
                    )
            self._found.add(place)

    def _check_cpus(self, name: str, wanted: float) -> None:
        # Ray would let what finds no room wait for ever.
        taken = sum(actor.num_cpus for actor in self._actors) + sum(group.num_cpus for group in self._groups)
        seen = ray.cluster_resources().get("CPU", 0.0)
        if taken + wanted > seen:
            raise WorkerError(
                f"{name!r} needs {wanted:g} logical CPUs, but {taken:g} of the {seen:g} that the Ray cluster has are "
                f"taken by this run. Start Ray with `ray start --head --num-cpus={taken + wanted:g}` or more "
                "(logical CPUs may exceed cores) and set cluster.address=auto"
            )

    def _check_gpus(self, name: str, wanted: float) -> None:
        taken = sum(actor.num_gpus for actor in self._actors) + sum(group.num_gpus for group in self._groups)
        seen = ray.cluster_resources().get("GPU", 0.0)
        if wanted and taken + wanted > seen:
            raise WorkerError(
                f"{name!r} needs {wanted:g} GPUs, but {taken:g} of the {seen:g} that the Ray cluster has are taken by "
                "this run: use fewer or smaller engine replicas, let them share the training processes' GPUs "
                "(rollout.engine.placement=colocated), or add nodes"
            )

    @property
    def is_remote(self) -> bool:
        """See :attr:`Runtime.is_remote`."""
        return True

    @property
    def nodes(self) -> int:
        """Number of nodes of the cluster that are alive."""
        return sum(node["Alive"] for node in ray.nodes())

    @property
    def here(self) -> str:
        """See :attr:`Runtime.here`."""
        return str(ray.get_runtime_context().get_node_id())

    @property
    def has_gpus(self) -> bool:
        """Whether a node of the cluster has a GPU that Ray knows."""
        return bool(ray.cluster_resources().get("GPU"))

    def _end(self) -> None:
        self._loop.close()
        if ray.is_initialized():
            for group in self._groups:
                group.close()
            for actor in self._actors:
                actor.kill()
            if self._owns_ray:
                # A reference to an object that the collector finds in another thread, while Ray shuts down, is released
                # in Ray's library after that has ended, which ends this process without a word.
                gc.collect()
                ray.shutdown()


def _show_output(data: dict[str, Any]) -> None:
    """Print what actors print, as Ray does, but log what engine servers print: much of it is noise of the engine."""
    if data.get("actor_name") != ENGINE_SERVER:
        print_to_stdstream(data, ignore_prefix=False)
        return
    # Not a name of ours, so that it goes to the log file only.
    log = logging.getLogger("engine_output")
    for line in data["lines"]:
        log.warning("pid %s: %s", data["pid"], line)
