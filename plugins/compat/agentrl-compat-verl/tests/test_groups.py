"""Worker groups of code for verl, in this process: futures, padding, meshes, modes."""

import pytest
import torch

from agentrl_compat_verl.dispatch import (
    DataProtoFuture,
    Dispatch,
    Execute,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from agentrl_compat_verl.groups import LocalWorkerGroup, Worker
from agentrl_compat_verl.protocol import DataProto
from agentrl_core.api.errors import ProtocolError, WorkerError
from agentrl_core.controller import ClassWithInitArgs

SPREAD = register_dispatch_mode(
    "SPREAD_FOR_TEST",
    lambda group, value: ([[value + rank for rank in range(group.world_size)]], {}),
    lambda group, results: sum(results),
)


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

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def add_later(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"x": batch.batch["x"] + 1})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def sum_of(self, left: DataProto, right: DataProto) -> DataProto:
        return DataProto.from_dict({"x": left.batch["x"] + right.batch["x"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    async def add_async(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"x": batch.batch["x"] + 10})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, function, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"x": function(batch.batch["x"])})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def total(self, batch: DataProto) -> int:
        return int(batch.batch["x"].sum())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def place(self, batch: DataProto | None = None) -> tuple[int, int, int]:
        if batch is not None:
            batch.pop(["x"])
        return self.rank, self.world_size, self.start

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def first(self) -> int:
        self.seen.append([])
        return self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def only_first(self) -> int:
        self.seen.append([])
        return self.rank

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def each(self, value: int, *, factor: int) -> int:
        return value * factor + self.rank

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def whole(self, batch: DataProto) -> int:
        return len(batch)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, materialize_futures=False)
    def kind(self, batch: object) -> str:
        return type(batch).__name__

    @register(dispatch_mode=SPREAD)
    def spread(self, value: int) -> int:
        return value

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("train"))
    def meshed(self, batch: DataProto) -> DataProto:
        return self.add(batch)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def wrong(self, batch: DataProto) -> int:
        return 1

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail(self) -> None:
        raise KeyError("as it was raised")


def group_of(world_size: int) -> LocalWorkerGroup:
    return LocalWorkerGroup(ClassWithInitArgs(Counting, start=7), world_size)


def batch_of(rows: int, **options: bool) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows)}, **options)


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
    assert group.total(batch_of(2)) == [0, 1]


def test_auto_padding_makes_equal_chunks_and_removes_the_rows_again() -> None:
    group = group_of(3)
    assert group.add(batch_of(4, auto_padding=True)).batch["x"].tolist() == [1, 2, 3, 4]
    assert [worker.seen for worker in group.workers] == [[[0, 1]], [[2, 3]], [[0, 1]]]


def test_a_group_with_auto_padding_pads_every_batch() -> None:
    with group_of(3) as group:
        group.auto_padding = True
        assert group.add(batch_of(4)).batch["x"].tolist() == [1, 2, 3, 4]
        assert [worker.seen for worker in group.workers] == [[[0, 1]], [[2, 3]], [[0, 1]]]
        assert group.add(group.add_later(batch_of(4))).batch["x"].tolist() == [2, 3, 4, 5]


def test_futures_of_one_call_are_arguments_of_the_next() -> None:
    group = group_of(3)
    for rows in (0, 2, 7):
        future = group.add_later(batch_of(rows))
        assert isinstance(future, DataProtoFuture)
        assert group.add(future).batch["x"].tolist() == [row + 2 for row in range(rows)]
        assert group.add_later(future).get().batch["x"].tolist() == [row + 2 for row in range(rows)]
    padded = group.add_later(batch_of(4, auto_padding=True))
    assert group.add(padded).batch["x"].tolist() == [2, 3, 4, 5]
    assert group_of(2).add(group.add_later(batch_of(7))).batch["x"].tolist() == [row + 2 for row in range(7)]


@pytest.mark.parametrize("rows", [1, 4, 5])
@pytest.mark.parametrize("pads", [False, True])
def test_a_future_and_a_batch_of_the_same_rows_meet_row_by_row_whatever_is_padded(rows: int, pads: bool) -> None:
    group = group_of(2)
    padded = batch_of(rows, auto_padding=pads)
    assert group.sum_of(group.add_later(batch_of(rows)), padded).batch["x"].tolist() == [2 * x + 1 for x in range(rows)]
    group.auto_padding = True
    assert group.add(group_of(2).add_later(batch_of(rows))).batch["x"].tolist() == [x + 2 for x in range(rows)]
    assert len(group.workers[0].seen[-1]) == len(group.workers[1].seen[-1])
    with pytest.raises(ProtocolError, match="same number of rows: 0 has 6, 1 has"):
        group.sum_of(group.add_later(batch_of(6)), padded)


def test_a_tensordict_is_not_given_whole_to_every_rank() -> None:
    with pytest.raises(ProtocolError, match=r"argument 0 is a TensorDict: pass DataProto.from_tensordict\("):
        group_of(2).add(batch_of(4).batch)


def test_a_future_that_reaches_the_worker_whole_is_materialized_unless_told_otherwise() -> None:
    group = group_of(2)
    future = group.add_later(batch_of(3))
    assert group.whole(future) == [3, 3]
    assert group.kind(future) == ["DataProtoFuture"] * 2


def test_dispatch_modes() -> None:
    group = group_of(2)
    assert group.place() == [(0, 2, 7), (1, 2, 7)]
    assert group.first() == 0
    assert group.only_first() == [0]
    assert [worker.seen for worker in group.workers] == [[[], []], []], "other ranks were called too"
    assert group.each([1, 2], factor=[10, 100]) == [10, 201]
    assert group.total(batch_of(4)) == [1, 5]
    assert group.apply(lambda x: x * 2, batch_of(3)).batch["x"].tolist() == [0, 2, 4]
    assert group.spread(5) == 11
    assert group.add_async(batch_of(3)).batch["x"].tolist() == [10, 11, 12]
    assert group.execute_rank_zero_sync("first") == 0
    assert group.execute_all_async("first").get() == [0, 1]


def test_mesh_dispatch_splits_over_dp_and_collects_one_rank_of_each_group() -> None:
    group = group_of(4)
    for rank, worker in enumerate(group.workers):
        worker.set_mesh_place("train", dp_rank=rank // 2, collects=rank % 2 == 1)
    out = group.meshed(batch_of(3))
    assert out.batch["x"].tolist() == [1, 2, 3] and out.batch["rank"].tolist() == [1, 1, 3]
    assert [worker.seen for worker in group.workers] == [[[0, 1]], [[0, 1]], [[2]], [[2]]]


def test_a_mesh_without_places_is_explained() -> None:
    with pytest.raises(WorkerError, match="set_mesh_place"):
        group_of(1).meshed(batch_of(1))


def test_a_custom_mode_can_be_replaced_but_not_registered_twice() -> None:
    mode = register_dispatch_mode("REPLACED_FOR_TEST", lambda group: ([], {}), lambda group, results: "old")
    with pytest.raises(WorkerError, match="update_dispatch_mode"):
        register_dispatch_mode("REPLACED_FOR_TEST", lambda group: ([], {}), lambda group, results: "other")
    new = update_dispatch_mode(mode, lambda group: ([], {}), lambda group, results: "new")
    assert getattr(Dispatch, "REPLACED_FOR_TEST") is new  # noqa: B009 - the attribute is made at run time

    class Asked(Worker):
        @register(dispatch_mode=new)
        def ask(self) -> None:
            return None

    assert LocalWorkerGroup(ClassWithInitArgs(Asked)).ask() == "new"


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
    with pytest.raises(ProtocolError, match="returned a int.*to get the list of results"):
        group.wrong(batch_of(2))
    with pytest.raises(ProtocolError, match="'factor' must be a list with an entry for each of 2 ranks, not a int"):
        group.each([1, 2], factor=1)
    with pytest.raises(ProtocolError, match="same number of rows"):
        group.add(batch_of(2), amount=batch_of(3))
    with pytest.raises(AttributeError, match="@register"):
        group.unknown()
    with pytest.raises(WorkerError, match="Dispatch"):
        register(dispatch_mode="DP_COMPUTE_PROTO")
    group.close()
    with pytest.raises(WorkerError, match="closed"):
        group.first()
