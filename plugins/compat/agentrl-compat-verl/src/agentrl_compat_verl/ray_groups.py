"""Worker groups of code for verl on Ray: options of Ray, pools that are shared, groups that outlive a driver."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import remove_placement_group

from agentrl_compat_verl.groups import VerlGroup
from agentrl_compat_verl.pools import RayResourcePool
from agentrl_core.api import WorkerError
from agentrl_core.controller import ClassWithInitArgs
from agentrl_core.controller.ray_group import ColocatedClasses, Processes
from agentrl_core.controller.ray_group import RayGroup as CoreRayGroup
from agentrl_core.controller.ray_group import RayWorkerGroup as CoreRayWorkerGroup
from agentrl_core.controller.ray_group import create_colocated_worker_cls as create_colocated_worker_cls
from agentrl_core.controller.ray_hosts import start_hosts

# Detached actors are found by name in it, whatever namespace the driver has.
NAMESPACE = "agentrl"


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class with its arguments, and the Ray options of its actors."""

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        super().__init__(cls, *args, **kwargs)
        self.options: dict[str, Any] = {}

    def update_options(self, **options: Any) -> None:
        """Sets options of ``ray.remote`` for the actors, such as ``runtime_env`` or ``num_cpus``."""
        self.options.update(options)


class RayGroup(VerlGroup, CoreRayGroup):
    """Calls the workers of some roles in Ray actors that are there already."""

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, CoreRayGroup]:
        """A group for each of these roles of a colocated group, over the same processes."""
        groups: dict[str, CoreRayGroup] = {}
        for role in super().spawn(prefix_set):
            made = RayGroup(self._roles[role], role, self._processes, {role: self._roles[role]})
            made.auto_padding = self.auto_padding
            groups[role] = made
        return groups


class RayWorkerGroup(RayGroup, CoreRayWorkerGroup):
    """Starts one Ray actor per rank of a resource pool, with one worker of the class in it, or several colocated ones.

    With ``detached_name`` the actors outlive this driver until a group that owns them is closed; `from_detached` finds
    them.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: ClassWithInitArgs,
        role: str = "",
        owns_pool: bool = False,
        detached_name: str = "",
    ) -> None:
        if detached_name and not getattr(resource_pool, "detached", False):
            raise WorkerError(f"the detached group {detached_name!r} needs a pool made with detached=True")
        self._detached_name = detached_name
        super().__init__(resource_pool, ray_cls_with_init, role, owns_pool)

    def _start(self, pool: Any, classes: Mapping[str, ClassWithInitArgs]) -> list[Any]:
        options: dict[str, Any] = {}
        for item in classes.values():
            options.update(getattr(item, "options", {}))
        name = self._detached_name

        def options_of(rank: int) -> dict[str, Any]:
            named = {"name": f"{name}/{rank}", "namespace": NAMESPACE, "lifetime": "detached"}
            return {**options, **(named if name else {})}

        return start_hosts(pool, classes, options_of)

    @staticmethod
    def from_detached(name: str, classes: Mapping[str, type], owns_actors: bool = False) -> RayGroup:
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
        role, worker = next(iter(classes.items())) if len(classes) == 1 else (name, object)
        processes = _Detached(actors, [placed for *_, placed in facts if placed is not None])
        processes.watch_over(role, [node for _, node, _, _ in facts])
        return RayGroup(worker, role, processes, classes, owns_actors)


class _Detached(Processes):
    """Processes whose placement groups nobody else gives back."""

    def __init__(self, actors: Sequence[Any], placement_groups: Sequence[Any]) -> None:
        super().__init__(actors)
        self._placement_groups = placement_groups

    def end(self) -> None:
        """Kills the actors, and gives back their placement groups."""
        super().end()
        for group in dict.fromkeys(self._placement_groups):
            remove_placement_group(group)


__all__ = [
    "ColocatedClasses",
    "RayClassWithInitArgs",
    "RayGroup",
    "RayResourcePool",
    "RayWorkerGroup",
    "create_colocated_worker_cls",
]
