"""The batch of code for verl: the operations that agentrl's own does not have."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_compat_verl.protocol import DataProto
from agentrl_core.api import ProtocolError
from agentrl_core.controller import ClassWithInitArgs, Dispatch, LocalWorkerGroup, Worker, register
from agentrl_core.protocol import DataProto as CoreDataProto


def batch_of(rows: int) -> DataProto:
    return DataProto.from_dict(
        {"ids": torch.arange(rows * 2).view(rows, 2), "scores": torch.arange(rows, dtype=torch.float32)},
        {"uid": [f"row-{row}" for row in range(rows)], "messages": [[{"role": "user"}]] * rows},
    )


def uids(data: DataProto) -> list[str]:
    return data.non_tensor_batch["uid"].tolist()


def test_iterator_sees_every_row_once_per_epoch_and_repeats_with_its_seed() -> None:
    data = batch_of(5)
    batches = list(data.make_iterator(mini_batch_size=2, epochs=2, seed=7))
    assert [len(batch) for batch in batches] == [2, 2, 1] * 2
    epochs = [sum((uids(batch) for batch in batches[start : start + 3]), []) for start in (0, 3)]
    assert all(sorted(epoch) == uids(data) for epoch in epochs) and epochs[0] != epochs[1]
    again = list(data.make_iterator(mini_batch_size=2, epochs=2, seed=7))
    assert list(map(uids, again)) == list(map(uids, batches))
    assert [uids(batch) for batch in data.make_iterator(4, 1)] == [uids(data)[:4], uids(data)[4:]]


def test_sample_level_repeat_and_unfold_column_chunks() -> None:
    assert uids(batch_of(3).sample_level_repeat([2, 0, 1])) == ["row-0", "row-0", "row-2"]
    unfolded = batch_of(2).unfold_column_chunks(2, ["ids"])
    assert unfolded.batch["ids"].tolist() == [[0], [1], [2], [3]]
    assert uids(unfolded) == ["row-0", "row-0", "row-1", "row-1"]


def test_unfold_column_chunks_cuts_a_list_in_each_row() -> None:
    calls = [[{"a": 1}, [2], "c", None], ["d", "e", "f", "g"]]
    data = DataProto.from_dict({"ids": torch.arange(4).view(2, 2)}, {"calls": calls, "uid": ["x", "y"]})
    unfolded = data.unfold_column_chunks(2, ["ids", "calls"])
    assert unfolded.non_tensor_batch["calls"].tolist() == [[{"a": 1}, [2]], ["c", None], ["d", "e"], ["f", "g"]]
    assert unfolded.non_tensor_batch["calls"].shape == (4,) and uids(unfolded) == ["x", "x", "y", "y"]
    with pytest.raises(ProtocolError, match=r"'calls' of shape \[2, 4\] cannot be cut into 3"):
        data.unfold_column_chunks(3, ["calls"])
    ragged = DataProto.from_dict({}, {"calls": [[1, 2], [3]]})
    with pytest.raises(ProtocolError, match=r"'calls' of shape \[2\] cannot be cut"):
        ragged.unfold_column_chunks(2, ["calls"])


def test_fold_and_unfold_batch_dim() -> None:
    folded = batch_of(4).fold_batch_dim(2)
    assert folded.batch["ids"].shape == (2, 2, 2) and folded.non_tensor_batch["uid"].shape == (2, 2)
    assert uids(folded.unfold_batch_dim()) == uids(batch_of(4))
    with pytest.raises(ProtocolError, match="4 rows cannot be folded into 3"):
        batch_of(4).fold_batch_dim(3)


def test_padding_repeats_a_row() -> None:
    assert uids(batch_of(2).padding(2, "first")) == ["row-0", "row-1", "row-0", "row-0"]
    with pytest.raises(ProtocolError, match="batch of 0 rows"):
        batch_of(0).padding(1)


def test_a_single_dictionary_is_sorted_into_tensors_and_objects() -> None:
    data = DataProto.from_single_dict({"x": torch.zeros(2), "pairs": [[1, 2], [3, 4]]}, {"step": 1})
    assert list(data.batch.keys()) == ["x"] and data[1].non_tensor_batch["pairs"] == [3, 4]
    assert data.meta_info == {"step": 1}


def test_the_options_of_verls_data_loader() -> None:
    data = DataProto.from_dict({"x": torch.arange(5)}, {"name": list("abcde")})
    ordered = data.make_iterator(2, 1, seed=1, dataloader_kwargs={"shuffle": False, "drop_last": True})
    assert [part.batch["x"].tolist() for part in ordered] == [[0, 1], [2, 3]]
    shuffled = data.make_iterator(2, 2, seed=1, dataloader_kwargs={"shuffle": True})
    seeded = data.make_iterator(2, 2, seed=1)
    assert [part.batch["x"].tolist() for part in shuffled] == [part.batch["x"].tolist() for part in seeded]
    with pytest.raises(ProtocolError, match="allowed: shuffle, drop_last"):
        data.make_iterator(2, 1, dataloader_kwargs={"num_workers": 2})  # type: ignore[dict-item]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 7), st.integers(1, 4))
def test_every_operation_keeps_rows_together(rows: int, number: int) -> None:
    data, names = batch_of(rows), [f"row-{row}" for row in range(rows)]
    assert uids(data.sample_level_repeat([number] * rows)) == [name for name in names for _ in range(number)]
    assert uids(data.unfold_column_chunks(number)) == [name for name in names for _ in range(number)]
    if rows:
        assert uids(batch_of(rows).padding(number, "first")) == [*names, *["row-0"] * number]
    seen = DataProto.concat([data[:0], *data.make_iterator(number, 2, seed=3)])
    assert sorted(uids(seen)) == sorted(names * 2)
    if rows % number == 0:
        folded = data.fold_batch_dim(number).unfold_batch_dim()
        assert uids(folded) == names and torch.equal(folded.batch["ids"], data.batch["ids"])


class Echo(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def second_half(self, batch: DataProto) -> DataProto:
        return list(batch.make_iterator(1, 1))[-1]


def test_worker_groups_and_pickles_keep_the_class() -> None:
    assert uids(pickle.loads(pickle.dumps(batch_of(2))).padding(1)) == ["row-0", "row-1", "row-1"]
    with LocalWorkerGroup(ClassWithInitArgs(Echo), 2) as group:
        out = group.second_half(batch_of(4))
        assert isinstance(out, DataProto) and uids(out) == ["row-1", "row-3"]
    mine = CoreDataProto.from_dict({"x": torch.arange(2)})
    assert DataProto(mine.batch, mine.non_tensor_batch, mine.meta_info).padding(1).batch["x"].tolist() == [0, 1, 1]


MISUSE: dict[str, Callable[[], Any]] = {
    "a fraction of a mini batch": lambda: batch_of(4).make_iterator("2", 1),  # type: ignore[arg-type]
    "text for repetitions": lambda: batch_of(4).sample_level_repeat("x"),  # type: ignore[arg-type]
    "a number for names": lambda: batch_of(4).unfold_column_chunks(2, 3),  # type: ignore[arg-type]
    "text for a size": lambda: batch_of(4).fold_batch_dim("2"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", MISUSE)
def test_misuse_is_a_protocol_error(what: str) -> None:
    with pytest.raises(ProtocolError):
        MISUSE[what]()
