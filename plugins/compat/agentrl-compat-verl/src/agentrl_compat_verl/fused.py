"""Fused workers: one worker object that is all roles of a rank."""

import inspect
from collections.abc import Mapping
from typing import Any

from agentrl_compat_verl.dispatch import MeshPlace
from agentrl_compat_verl.groups import Worker
from agentrl_core.api import WorkerError
from agentrl_core.controller import ClassWithInitArgs, DispatchMode
from agentrl_core.controller.decorator import MARK, forwarding, registrations


class FusedWorker(Worker):
    """The workers of all roles, made in the order of their classes, in one object.

    Each finds the others in its ``fused_workers``, by role, once all are made.
    """

    classes: Mapping[str, ClassWithInitArgs]

    def __init__(self) -> None:
        self.fused_workers: dict[str, Any] = {role: item() for role, item in self.classes.items()}
        for worker in self.fused_workers.values():
            worker.fused_workers = self.fused_workers

    def get_mesh_place(self, mesh_name: str) -> MeshPlace:
        """The place that one of the roles declared."""
        for worker in self.fused_workers.values():
            if mesh_name in getattr(worker, "mesh_places", ()):
                place: MeshPlace = worker.get_mesh_place(mesh_name)
                return place
        return super().get_mesh_place(mesh_name)

    def close(self) -> None:
        """Closes the workers that have a ``close`` method."""
        for worker in self.fused_workers.values():
            if callable(close := getattr(worker, "close", None)):
                close()


def create_fused_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> type[FusedWorker]:
    """A worker class that is all roles: the method ``update`` of the role ``actor`` is its ``actor_update``.

    Where `create_colocated_worker_cls` gives every role its own group over shared processes, this is one worker
    for one group, local or on Ray, whose parts may call each other without a round trip.
    """
    methods: dict[str, Any] = {}
    for role, item in class_dict.items():
        for name, registration in registrations(item.cls).items():
            if f"{role}_{name}" in methods:
                raise WorkerError(f"two roles of {sorted(class_dict)} have a method {role}_{name}: rename a role")
            is_async = inspect.iscoroutinefunction(inspect.getattr_static(item.cls, name))
            methods[f"{role}_{name}"] = _forward(role, name, registration, is_async)
    return type(f"Fused_{'_'.join(class_dict)}", (FusedWorker,), {"classes": dict(class_dict), **methods})


def _forward(role: str, name: str, registration: DispatchMode, is_async: bool) -> Any:
    method = forwarding(lambda worker: getattr(worker.fused_workers[role], name), is_async)
    method.__name__ = f"{role}_{name}"
    setattr(method, MARK, registration)
    return method
