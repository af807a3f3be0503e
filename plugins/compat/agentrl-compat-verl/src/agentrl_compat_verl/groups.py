"""Workers and worker groups of code for verl: futures, meshes, padding, calls by name.

Such code imports from here what it imports from ``verl.single_controller``. Groups on Ray are in ``ray_groups``.
"""

from typing import Any, Self

from agentrl_compat_verl.dispatch import BatchPlan, DataProtoFuture, GroupFuture, MeshPlace, RegisteredMode
from agentrl_core.api import WorkerError
from agentrl_core.controller import DispatchMode, WorkerGroup
from agentrl_core.controller import LocalWorkerGroup as CoreLocalWorkerGroup
from agentrl_core.controller import Worker as CoreWorker


class Worker(CoreWorker):
    """A worker that may have a place in device meshes."""

    mesh_places: dict[str, MeshPlace]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        worker = super().__new__(cls, *args, **kwargs)
        worker.mesh_places = {}
        return worker

    def set_mesh_place(self, mesh_name: str, dp_rank: int, collects: bool = True) -> None:
        """Declares this rank's place in a mesh, for `make_nd_compute_dataproto_dispatch_fn`."""
        self.mesh_places[mesh_name] = MeshPlace(dp_rank, collects)

    def get_mesh_place(self, mesh_name: str) -> MeshPlace:
        """The place that was declared. Raises WorkerError that names the meshes there are."""
        if mesh_name not in self.mesh_places:
            raise WorkerError(
                f"rank {self.rank} has no place in the mesh {mesh_name!r}, only in {sorted(self.mesh_places)}: "
                "call self.set_mesh_place(name, dp_rank, collects) when the worker sets itself up"
            )
        return self.mesh_places[mesh_name]


class VerlGroup(WorkerGroup):
    """What groups of both runtimes have in addition to agentrl's.

    Unregistered methods are reached by name through ``execute_all…`` (same arguments for every rank) and
    ``execute_rank_zero…``. With ``auto_padding`` every batch that is split over the ranks is filled up with rows from
    its start until the chunks are equal, as if it had been made with ``auto_padding``; the result's rows for them are
    removed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.auto_padding = False
        self._mesh_layouts: dict[str, list[MeshPlace]] = {}
        super().__init__(*args, **kwargs)

    def _call(self, method: str, mode: DispatchMode, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(mode, RegisteredMode) or mode.blocking:
            return super()._call(method, mode, *args, **kwargs)
        plan = mode.plan(self, args, kwargs)
        handles = self._submit(method, plan.calls)
        called = [rank for rank, call in enumerate(plan.calls) if call is not None]
        chosen, fetch = (
            [handles[called.index(rank)] for rank in plan.result_ranks],
            self._fetcher(method, plan.result_ranks),
        )
        if isinstance(plan, BatchPlan):
            return DataProtoFuture(chosen, fetch, plan.collect, plan.rows)
        return GroupFuture(chosen, fetch, plan.collect)

    def execute_all_async(self, method: str, *args: Any, **kwargs: Any) -> GroupFuture[list[Any]]:
        """Starts ``method`` with the same arguments on every rank; ``get()`` gives the list of results."""
        handles = self._submit(method, [(args, kwargs)] * self.world_size)
        return GroupFuture(handles, self._fetcher(method, range(self.world_size)), list)

    def execute_all_sync(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Runs ``method`` with the same arguments on every rank; the list of results."""
        return self.execute_all_async(method, *args, **kwargs).get()

    execute_all = execute_all_async

    def execute_rank_zero_async(self, method: str, *args: Any, **kwargs: Any) -> GroupFuture[Any]:
        """Starts ``method`` on rank 0; ``get()`` gives its result."""
        handles = self._submit(method, [(args, kwargs), *[None] * (self.world_size - 1)])
        return GroupFuture(handles, self._fetcher(method, [0]), lambda results: results[0])

    def execute_rank_zero_sync(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Runs ``method`` on rank 0; its result."""
        return self.execute_rank_zero_async(method, *args, **kwargs).get()

    execute_rank_zero = execute_rank_zero_async

    def mesh_layout(self, mesh_name: str) -> list[MeshPlace]:
        """Each rank's place in a mesh; asked once."""
        if mesh_name not in self._mesh_layouts:
            self._mesh_layouts[mesh_name] = self.execute_all_sync("get_mesh_place", mesh_name)
        return self._mesh_layouts[mesh_name]


class LocalWorkerGroup(VerlGroup, CoreLocalWorkerGroup):
    """Workers as plain objects, called in rank order."""
