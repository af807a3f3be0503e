"""Worker groups of code for verl on Ray: one cluster for the whole module."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist

from agentrl_compat_verl.dispatch import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from agentrl_compat_verl.groups import Worker
from agentrl_compat_verl.pools import RayResourcePool
from agentrl_compat_verl.protocol import DataProto
from agentrl_compat_verl.ray_groups import RayClassWithInitArgs, RayGroup, RayWorkerGroup, create_colocated_worker_cls
from agentrl_core.api import WorkerError
from agentrl_core.controller import ClassWithInitArgs, Runtime

pytestmark = pytest.mark.ray


def worker_class() -> type:
    """Made in a function, so that it travels to the actors by value."""

    class Counting(Worker):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def add(self, batch: DataProto, amount: int = 1) -> DataProto:
            return DataProto.from_dict({"x": batch.batch["x"] + amount})

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
        def add_later(self, batch: DataProto) -> DataProto:
            return DataProto.from_dict({"x": batch.batch["x"] + 1})

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def rows(self, batch: DataProto) -> int:
            return len(batch)

        @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
        def gather(self, batch: DataProto) -> list[list[int]]:
            dist.init_process_group("gloo")
            try:
                parts: list[Any] = [None] * self.world_size
                dist.all_gather_object(parts, batch)
                return [part.batch["x"].tolist() for part in parts]
            finally:
                dist.destroy_process_group()

        def variable(self, name: str) -> str:
            return os.environ[name]

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def pid(self) -> int:
            return os.getpid()

    return Counting


def actor_class() -> type:
    class Echo:
        def echo(self, text: str) -> str:
            return text

    return Echo


def batch_of(rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows)}, {"o": [str(row) for row in range(rows)]})


@pytest.fixture(scope="module")
def runtime(ray_runtime: Runtime) -> Runtime:
    return ray_runtime


@pytest.fixture(scope="module")
def group(runtime: Runtime) -> Iterator[RayGroup]:
    classes = create_colocated_worker_cls({"counting": RayClassWithInitArgs(worker_class())})
    with RayWorkerGroup(RayResourcePool([2], strategy="PACK"), classes, owns_pool=True) as both:
        spawned = both.spawn(["counting"])["counting"]
        assert isinstance(spawned, RayGroup)
        yield spawned


def test_futures_are_not_fetched(group: RayGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[object] = []
    get = ray.get

    def watched_get(refs: Any, **options: Any) -> Any:
        # The liveness watch asks for single pings whenever it likes; a call fetches a list.
        fetched.extend([refs] if isinstance(refs, list) else [])
        return get(refs, **options)

    monkeypatch.setattr(ray, "get", watched_get)
    second = group.add_later(group.add_later(batch_of(4)))
    assert not fetched
    assert second.get().batch["x"].tolist() == [2, 3, 4, 5]


def test_futures_go_from_worker_to_worker(group: RayGroup) -> None:
    first = group.add_later(batch_of(5))
    second = group.add_later(first)
    assert group.add(second).batch["x"].tolist() == [row + 3 for row in range(5)]
    assert group.rows(second) == [5, 5]


def test_ranks_form_a_process_group_and_gather_uneven_batches(group: RayGroup) -> None:
    assert group.gather(batch_of(3)) == [[[0, 1], [2]]] * 2


SECOND_DRIVER = """
import sys, torch
from agentrl_core.controller.ray_runtime import RayRuntime
from agentrl_compat_verl.dispatch import Dispatch, register
from agentrl_compat_verl.groups import Worker
from agentrl_compat_verl.protocol import DataProto
from agentrl_compat_verl.ray_groups import RayWorkerGroup

class Counting(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add(self, batch: DataProto, amount: int = 1) -> DataProto: ...
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def pid(self) -> int: ...

RayRuntime(address=sys.argv[1])
group = RayWorkerGroup.from_detached("lasting", {"counting": Counting})
out = group.add(DataProto.from_dict({"x": torch.arange(3)}), amount=5)
sys.stdout.write(f"{out.batch['x'].tolist()} {group.pid()}")
group.close()
"""


@pytest.mark.slow
def test_another_driver_attaches_to_detached_actors_by_name(runtime: Runtime, tmp_path: Path) -> None:
    pool = RayResourcePool([2], strategy="PACK", detached=True)
    cls = RayClassWithInitArgs(worker_class())
    with pytest.raises(WorkerError, match="needs a pool made with detached=True"):
        RayWorkerGroup(RayResourcePool([1]), cls, detached_name="lasting")
    first = RayWorkerGroup(pool, cls, role="counting", detached_name="lasting")
    script = tmp_path / "driver.py"
    script.write_text(SECOND_DRIVER)
    address = ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, str(script), address], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"[5, 6, 7] {first.pid()}"
    with pytest.raises(WorkerError, match=r"'lasting' has the roles \['counting'\], not \['reward'\]"):
        RayWorkerGroup.from_detached("lasting", {"reward": worker_class()})
    with RayWorkerGroup.from_detached("lasting", {"counting": worker_class()}, owns_actors=True) as owner:
        assert owner.pid() == first.pid()
    with pytest.raises(WorkerError, match="no detached worker group 'lasting'"):
        RayWorkerGroup.from_detached("lasting", {"counting": worker_class()})
    first.close()


def test_mesh_axes_split_over_dp_and_replicate_over_the_others(runtime: Runtime) -> None:
    class Meshed(Worker):
        def __init__(self) -> None:
            # Two data-parallel groups of two ranks each.
            self.set_mesh_place("actor", self.rank // 2, collects=self.rank % 2 == 0)

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("actor"))
        def where(self, batch: DataProto) -> DataProto:
            x = batch.batch["x"]
            return DataProto.from_dict({"x": x, "rank": torch.full_like(x, self.rank)})

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("absent"))
        def nowhere(self, batch: DataProto) -> DataProto:
            return batch

    pool = RayResourcePool([4], strategy="PACK")
    with RayWorkerGroup(pool, ClassWithInitArgs(Meshed), owns_pool=True) as group:
        out = group.where(batch_of(5))
        assert out.batch["x"].tolist() == list(range(5)) and out.batch["rank"].tolist() == [0, 0, 0, 2, 2]
        with pytest.raises(WorkerError, match=r"no place in the mesh 'absent', only in \['actor'\]"):
            group.nowhere(batch_of(2))


def test_an_actor_of_your_own_takes_a_share_of_a_ranks_bundle(runtime: Runtime) -> None:
    pool = RayResourcePool([1], num_cpus=1, max_colocate_count=2)
    actor = ray.remote(actor_class()).options(**pool.actor_options(0)).remote()
    assert ray.get(actor.echo.remote("here")) == "here"
    assert pool.actor_options(0)["num_cpus"] == 0.5
    ray.kill(actor)
    pool.close()


def test_options_of_ray_reach_the_processes_of_a_group(runtime: Runtime) -> None:
    cls = RayClassWithInitArgs(worker_class())
    cls.update_options(runtime_env={"env_vars": {"MARK": "mine"}})
    with RayWorkerGroup(RayResourcePool([1]), cls, owns_pool=True) as group:
        assert group.execute_rank_zero_sync("variable", "MARK") == "mine"
