"""Fused workers and pools by role, in this process and on Ray."""

import pytest
import torch
import torch.distributed as dist

from agentrl_compat_verl.dispatch import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from agentrl_compat_verl.fused import create_fused_worker_cls
from agentrl_compat_verl.groups import LocalWorkerGroup, Worker
from agentrl_compat_verl.pools import RayResourcePool, ResourcePoolManager, merge_resource_pool, split_resource_pool
from agentrl_compat_verl.protocol import DataProto, all_gather_data_proto
from agentrl_compat_verl.ray_groups import RayClassWithInitArgs, RayWorkerGroup
from agentrl_core.api import ConfigError, WorkerError
from agentrl_core.controller import ClassWithInitArgs


def worker_class() -> type:
    """Made in a function, so that it travels to the actors by value."""

    class Counting(Worker):
        def __init__(self, start: int = 0) -> None:
            self.start = start

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        async def add(self, batch: DataProto) -> DataProto:
            return DataProto.from_dict({"x": batch.batch["x"] + self.start})

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def place(self) -> tuple[int, int, int]:
            return self.rank, self.world_size, self.start

        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("train"))
        def ranks(self, batch: DataProto) -> DataProto:
            return DataProto.from_dict({"rank": torch.full_like(batch.batch["x"], self.rank)})

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def gather(self, batch: DataProto) -> DataProto:
            dist.init_process_group("gloo")
            try:
                return all_gather_data_proto(batch)
            finally:
                dist.destroy_process_group()

    return Counting


class Prefixed(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def b_add(self) -> None:
        return None


def fused_class() -> type:
    return create_fused_worker_cls(
        {"actor": ClassWithInitArgs(worker_class(), start=1), "critic": ClassWithInitArgs(worker_class(), start=2)}
    )


def batch_of(rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows)})


def test_fused_workers_are_one_object_with_the_methods_and_meshes_of_all_roles() -> None:
    group = LocalWorkerGroup(ClassWithInitArgs(fused_class()), world_size=2)
    assert group.actor_place() == [(0, 2, 1), (1, 2, 1)] and group.critic_place() == [(0, 2, 2), (1, 2, 2)]
    assert group.critic_add(batch_of(3)).batch["x"].tolist() == [2, 3, 4]
    with pytest.raises(WorkerError, match="no place in the mesh 'train'"):
        group.critic_ranks(batch_of(2))
    for rank, worker in enumerate(group.workers):
        worker.fused_workers["critic"].set_mesh_place("train", dp_rank=0, collects=rank == 1)
        assert worker.fused_workers["actor"].fused_workers["critic"] is worker.fused_workers["critic"]
    assert group.critic_ranks(batch_of(2)).batch["rank"].tolist() == [1, 1]
    with pytest.raises(WorkerError, match="have a method a_b_add"):
        create_fused_worker_cls({"a": ClassWithInitArgs(Prefixed), "a_b": ClassWithInitArgs(worker_class())})


def test_roles_share_named_pools() -> None:
    with pytest.raises(ConfigError, match="'critic' is mapped to the pool 'b'"):
        ResourcePoolManager({"a": [1]}, {"critic": "b"})
    manager = ResourcePoolManager({"a": [2], "b": [1]}, {"actor": "a", "critic": "a"}, num_cpus=2)
    assert manager.needed() == {"CPU": 6}
    assert manager.get_resource_pool("critic").max_colocate_count == 2
    with pytest.raises(ConfigError, match="'reward' has no resource pool"):
        manager.get_resource_pool("reward")


@pytest.mark.ray
@pytest.mark.usefixtures("ray_runtime")
def test_a_fused_group_over_half_of_a_pool_on_ray() -> None:
    pool = RayResourcePool([4], num_cpus=0.5, strategy="PACK")
    halves = split_resource_pool(pool, 2)
    assert [half.world_size for half in halves] == [2, 2]
    assert merge_resource_pool(*halves).world_size == 4
    with pytest.raises(ConfigError, match="4 processes cannot be split into 3"):
        split_resource_pool(pool, 3)
    with RayWorkerGroup(halves[1], RayClassWithInitArgs(fused_class())) as group:
        assert group.actor_place() == [(0, 2, 1), (1, 2, 1)]
        assert group.critic_add(group.actor_add(batch_of(3))).batch["x"].tolist() == [3, 4, 5]
        gathered = group.actor_gather(batch_of(3))
        assert isinstance(gathered, DataProto) and gathered.batch["x"].tolist() == [0, 1, 2, 0, 1, 2]
    pool.close()


@pytest.mark.ray
@pytest.mark.usefixtures("ray_runtime")
def test_a_cluster_that_is_too_small_says_what_it_has_and_what_is_needed() -> None:
    with pytest.raises(WorkerError, match=r"CPU: \d+ seen, 100 needed"):
        ResourcePoolManager({"big": [100]}, {"actor": "big"}).check_resource_available(timeout=0)
    ResourcePoolManager({"small": [1]}, {"actor": "small"}).check_resource_available(timeout=20)
