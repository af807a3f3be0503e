"""Worker groups in this process."""

import subprocess
import sys

import pytest
import torch

from agentrl_core.api.errors import ConfigError, ProtocolError, WorkerError
from agentrl_core.controller import (
    ClassWithInitArgs,
    Dispatch,
    LocalWorkerGroup,
    RayResourcePool,
    Worker,
    register,
)
from agentrl_core.protocol import DataProto


class Counting(Worker):
    def __init__(self, start: int = 0) -> None:
        self.start = start
        self.seen: list[list[int]] = []

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add(self, batch: DataProto, amount: int = 1) -> DataProto:
        x = batch.batch["x"]
        self.seen.append(x.tolist())
        out = {"x": x + amount, "rank": torch.full_like(x, self.rank)}
        return DataProto.from_dict(out, meta_info={"metrics": {"rows": len(x)}, "timing": {"add": float(self.rank)}})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def add_async(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"x": batch.batch["x"] + 10})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def place(self, batch: DataProto | None = None) -> tuple[int, int, int]:
        if batch is not None:
            batch.pop(["x"])
        return self.rank, self.world_size, self.start

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def wrong(self, batch: DataProto) -> int:
        return 1

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self) -> None:
        raise KeyError("as it was raised")


def group_of(world_size: int) -> LocalWorkerGroup:
    return LocalWorkerGroup(ClassWithInitArgs(Counting, start=7), world_size)


def batch_of(rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows)})


def test_async_methods_run_to_their_end() -> None:
    assert group_of(2).add_async(batch_of(3)).batch["x"].tolist() == [10, 11, 12]


@pytest.mark.parametrize("rows", range(8))
def test_any_number_of_rows_keeps_length_and_order(rows: int) -> None:
    out = group_of(3).add(batch_of(rows), amount=5)
    assert out.batch["x"].tolist() == [row + 5 for row in range(rows)]
    assert sorted(out.batch["rank"].tolist()) == out.batch["rank"].tolist()


def test_fewer_rows_than_workers() -> None:
    group = group_of(3)
    out = group.add(batch_of(2))
    assert out.batch["x"].tolist() == [1, 2]
    # The third rank ran too, so that collectives go on, and its result was dropped.
    assert [worker.seen for worker in group.workers] == [[[0]], [[1]], [[0]]]
    assert out.meta_info == {"metrics": {"rows": [1, 1]}, "timing": {"add": 1.0}}


def test_a_tensordict_is_not_given_whole_to_every_rank() -> None:
    with pytest.raises(ProtocolError, match=r"argument 0 is a TensorDict: pass DataProto.from_tensordict\("):
        group_of(2).add(batch_of(4).batch)


def test_exceptions_propagate_unchanged() -> None:
    with pytest.raises(KeyError, match="as it was raised") as caught:
        group_of(2).fail()
    frames = [frame.name for frame in caught.traceback]
    assert "fail" in frames


def test_a_worker_cannot_change_the_callers_batch() -> None:
    batch = batch_of(2)
    group_of(2).place(batch)
    assert "x" in batch.batch.keys()


def test_wrong_calls_are_explained() -> None:
    group = group_of(2)
    with pytest.raises(ProtocolError, match="returned a int.*ONE_TO_ALL"):
        group.wrong(batch_of(2))
    with pytest.raises(ProtocolError, match="same number of rows"):
        group.add(batch_of(2), amount=batch_of(3))
    with pytest.raises(AttributeError, match="@register"):
        group.unknown()
    with pytest.raises(WorkerError, match="Dispatch"):
        register(dispatch_mode="DP_COMPUTE_PROTO")
    group.close()
    with pytest.raises(WorkerError, match="closed"):
        group.place()


def test_a_registered_name_must_not_hide_one_of_the_group() -> None:
    class Hiding(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def close(self) -> None:
            return None

    with pytest.raises(WorkerError, match="Hiding.close"):
        LocalWorkerGroup(ClassWithInitArgs(Hiding))


def test_a_worker_alone_is_rank_zero_of_one() -> None:
    worker = Counting()
    assert (worker.rank, worker.world_size, worker.local_rank) == (0, 1, 0)
    assert worker.add(batch_of(1)).batch["x"].tolist() == [1]


def test_resource_pools_describe_their_ranks() -> None:
    pool = RayResourcePool([2, 1])
    assert (pool.world_size, pool.local_rank_list, pool.local_world_size_list) == (3, [0, 1, 0], [2, 2, 1])
    with pytest.raises(ConfigError):
        RayResourcePool([0])


def test_the_local_controller_does_not_import_ray() -> None:
    code = "import sys, agentrl_core.controller as c; c.make_runtime('local'); assert 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
