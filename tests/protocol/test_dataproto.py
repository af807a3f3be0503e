"""DataProto: construction, access, columns and combination."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from agentrl_core.api.errors import ProtocolError
from agentrl_core.protocol import DataProto, merge_meta_info
from agentrl_core.protocol.containers import equal


def batch_of(rows: int, meta: dict | None = None) -> DataProto:
    return DataProto.from_dict(
        {"ids": torch.arange(rows * 2).view(rows, 2), "scores": torch.arange(rows, dtype=torch.float32)},
        {"uid": [f"row-{row}" for row in range(rows)], "messages": [[{"role": "user"}]] * rows},
        meta or {},
    )


def uids(data: DataProto) -> list[str]:
    return data.non_tensor_batch["uid"].tolist()


def test_concat_does_not_keep_only_the_first_meta_info() -> None:
    first = DataProto(meta_info={"step": 3, "metrics": {"loss": 1.0}, "timing": {"update": 0.1}})
    second = DataProto(meta_info={"step": 3, "metrics": {"loss": [2.0, 3.0], "norm": 9.0}, "temperature": 0.7})
    merged = DataProto.concat([first, second]).meta_info
    assert merged == {
        "step": 3,
        "metrics": {"loss": [1.0, 2.0, 3.0], "norm": [9.0]},
        "timing": {"update": 0.1},
        "temperature": 0.7,
    }


def test_concat_does_not_fail_on_float_timings() -> None:
    merged = merge_meta_info([{"timing": {"gen": 1.25, "tool": 0.5}}, {"timing": {"gen": 1.26}}])
    assert merged == {"timing": {"gen": 1.26, "tool": 0.5}}


def test_concat_reports_every_entry_that_differs_by_name() -> None:
    with pytest.raises(ProtocolError, match=r"'temperature' \(0.5 and 1.0\).*'eos'"):
        DataProto.concat([DataProto(meta_info={"temperature": t, "eos": t, "n": 1}) for t in (0.5, 1.0)])


def test_nan_in_meta_info_equals_itself() -> None:
    assert np.isnan(merge_meta_info([{"x": float("nan")}, {"x": float("nan")}])["x"])


def test_chunks_do_not_share_meta_info() -> None:
    data = batch_of(4, {"nested": {"list": [1]}, "array": np.zeros(2)})
    first, second = data.chunk(2)
    first.meta_info["nested"]["list"].append(2)
    first.meta_info["array"][0] = 5
    for other in (second, data):
        assert other.meta_info["nested"] == {"list": [1]}
        assert other.meta_info["array"].tolist() == [0, 0]


def test_constructor_does_not_share_its_arguments() -> None:
    td, columns, meta = TensorDict({"x": torch.ones(1)}, [1]), {"o": np.array(["a"], dtype=object)}, {"m": [1]}
    data = DataProto(td, columns, meta)
    td["y"], columns["o"][0] = torch.ones(1), "changed"
    meta["m"].append(2)
    assert list(data.batch.keys()) == ["x"]
    assert data.non_tensor_batch["o"].tolist() == ["a"]
    assert data.meta_info == {"m": [1]}


def test_lists_of_equal_length_stay_one_object_per_row() -> None:
    data = DataProto.from_dict({"x": torch.zeros(2)}, {"pairs": [[1, 2], [3, 4]]})
    assert data.non_tensor_batch["pairs"].shape == (2,)
    assert data[1].non_tensor_batch["pairs"] == [3, 4]


@pytest.mark.parametrize(
    "index, expected",
    [
        (slice(1, 4, 2), [1, 3]),
        (slice(None, None, -1), [4, 3, 2, 1, 0]),
        ([3, -5, 3], [3, 0, 3]),
        ([], []),
        (np.array([2, 0]), [2, 0]),
        (torch.tensor([4]), [4]),
        ([True, False, False, True, False], [0, 3]),
        (np.array([False, True, False, False, False]), [1]),
        (torch.tensor([False] * 5), []),
        (range(2), [0, 1]),
    ],
)
def test_indexing_takes_the_same_rows_of_all_columns(index: object, expected: list[int]) -> None:
    chosen = batch_of(5)[index]
    assert uids(chosen) == [f"row-{row}" for row in expected]
    assert chosen.batch["scores"].tolist() == expected
    assert len(chosen) == len(expected)


def test_item_is_one_row() -> None:
    item = batch_of(3, {"m": 1})[-1]
    assert item.batch["ids"].tolist() == [4, 5]
    assert item.non_tensor_batch["uid"] == "row-2"
    assert item.meta_info == {"m": 1}
    assert [item.non_tensor_batch["uid"] for item in batch_of(2)] == ["row-0", "row-1"]


@pytest.mark.parametrize("index", [5, -6, [5], [0.5], [True], [[0]], "uid", torch.tensor([7])])
def test_a_wrong_index_is_a_protocol_error(index: object) -> None:
    with pytest.raises(ProtocolError):
        batch_of(5)[index]


def test_sizes_that_disagree_are_named_with_their_column() -> None:
    with pytest.raises(ProtocolError, match=r"'b' has batch size \[3\], 'a' has \[2\]"):
        DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(ProtocolError, match=r"non_tensor_batch\['o'\] has 3 rows, the batch has 2"):
        DataProto.from_dict({"a": torch.zeros(2)}, {"o": [1, 2, 3]})
    with pytest.raises(ProtocolError, match="one entry per row"):
        DataProto.from_dict(non_tensors={"o": "text"})


def test_select_pop_and_rename() -> None:
    data = batch_of(3, {"a": 1, "b": 2})
    chosen = data.select(["ids"], ["uid"], ["a"])
    assert (list(chosen.batch.keys()), list(chosen.non_tensor_batch), chosen.meta_info) == (["ids"], ["uid"], {"a": 1})
    assert len(data.select([], [])) == 3
    popped = data.pop(["scores"], ["messages"], ["b"])
    assert list(popped.batch.keys()) == ["scores"] and popped.meta_info == {"b": 2}
    assert (list(data.batch.keys()), list(data.non_tensor_batch), data.meta_info) == (["ids"], ["uid"], {"a": 1})
    assert data.rename(["ids", "uid"], ["input_ids", "id"]) is data
    assert (list(data.batch.keys()), list(data.non_tensor_batch)) == (["input_ids"], ["id"])


def test_pop_of_an_unknown_key_names_it_and_changes_nothing() -> None:
    data = batch_of(2)
    with pytest.raises(ProtocolError, match=r"pop: batch has no 'nope'; it has \['ids', 'scores'\]"):
        data.pop(["ids", "nope"])
    assert "ids" in data.batch.keys()


def test_rename_onto_another_column_is_an_error_and_swapping_is_not() -> None:
    data = batch_of(2)
    with pytest.raises(ProtocolError, match="uid"):
        data.rename("ids", "uid")
    data.rename(["ids", "scores"], ["scores", "ids"])
    assert data.batch["ids"].dtype == torch.float32


def test_union_takes_new_columns_and_names_those_that_differ() -> None:
    data = DataProto.from_dict({"x": torch.tensor([1.0, float("nan")])}, {"o": [{"a": np.ones(2)}, None]})
    same = DataProto.from_dict(
        {"x": torch.tensor([1.0, float("nan")]), "y": torch.zeros(2)}, {"o": [{"a": np.ones(2)}, None]}
    )
    assert data.union(same) is data
    assert set(data.batch.keys()) == {"x", "y"}
    with pytest.raises(ProtocolError, match="'y'"):
        data.union(DataProto.from_dict({"y": torch.ones(2), "z": torch.ones(2)}))
    with pytest.raises(ProtocolError, match="'o'"):
        data.union(DataProto.from_dict(non_tensors={"o": [{"a": np.zeros(2)}, None]}))
    with pytest.raises(ProtocolError, match="2 and 3 rows"):
        data.union(DataProto.from_dict({"w": torch.ones(3)}))
    assert set(data.batch.keys()) == {"x", "y"}


def test_union_names_nested_columns_that_differ() -> None:
    """Strided ones have no shape: asking for it is an error of torch's."""
    one, other = (
        DataProto.from_dict({"x": torch.nested.nested_tensor([torch.full((1, 2), value), torch.ones(2, 2)])})
        for value in (0.0, 1.0)
    )
    with pytest.raises(ProtocolError, match=r"'x' \(nested and nested\)"):
        one.union(other)


def test_concat_names_columns_that_do_not_fit() -> None:
    with pytest.raises(ProtocolError, match=r"'x' has shape \[1, 2\] in part 0 and \[1, 3\] in part 1"):
        DataProto.concat([DataProto.from_dict({"x": torch.zeros(1, width)}) for width in (2, 3)])
    with pytest.raises(ProtocolError, match="'b' in one only"):
        DataProto.concat([DataProto.from_dict(non_tensors=c) for c in ({"a": [1]}, {"a": [1], "b": [2]})])
    with pytest.raises(ProtocolError, match="no batch"):
        DataProto.concat([])


def test_fewer_rows_than_chunks() -> None:
    chunks = batch_of(2).chunk(3)
    assert [len(chunk) for chunk in chunks] == [1, 1, 0]
    assert chunks[2].batch["ids"].shape == (0, 2)


def test_tensordict_round_trip() -> None:
    for data in (batch_of(3, {"m": [1]}), batch_of(0)):
        again = DataProto.from_tensordict(data.to_tensordict())
        assert (uids(again), again.meta_info) == (uids(data), data.meta_info)
        assert torch.equal(again.batch["ids"], data.batch["ids"])


@pytest.mark.parametrize("data", [DataProto(), DataProto(TensorDict({}, [])), batch_of(0), batch_of(3).select([])])
def test_batches_without_rows_or_tensors_work_in_every_operation(data: DataProto) -> None:
    rows = len(data)
    results = [data[:], data.repeat(1), data.select(), copy.copy(data), copy.deepcopy(data), data.writable()]
    results += [DataProto.concat(data.chunk(4)), DataProto.concat(data.split(2)), data.slice().to("cpu")]
    results += [DataProto.concat([data]), data.slice().union(data), data.slice().reorder(list(range(rows)))]
    assert [len(result) for result in results] == [rows] * len(results)
    assert data.get_data_info() and data.nbytes() == 0


def test_writable_shares_neither_tensors_nor_row_objects() -> None:
    data = batch_of(2)
    private = data.writable()
    private.batch["ids"].zero_()
    private.non_tensor_batch["messages"][0].append("mine")
    assert data.batch["ids"].sum() == 6 and data.non_tensor_batch["messages"][0] == [{"role": "user"}]


def test_jagged_columns_that_share_offsets_can_still_be_multiplied() -> None:
    offsets = torch.tensor([0, 2, 2, 5])
    values = {key: torch.nested.nested_tensor_from_jagged(torch.arange(5.0), offsets=offsets) for key in "ab"}
    data = DataProto.from_dict(values)
    for result in (data[[2, 1, 0]], data.repeat(2), DataProto.concat([data, data]), data.writable(), data[1:]):
        product = result.batch["a"] * result.batch["b"]
        assert [row.tolist() for row in product.unbind()] == [(row**2).tolist() for row in result.batch["a"].unbind()]
    assert [row.tolist() for row in data[[2, 0]].batch["a"].unbind()] == [[2, 3, 4], [0, 1]]


def positions() -> DataProto:
    """Two rows of three-axis positions, of four tokens and of one."""
    values = torch.tensor([[1.0, 2, 3, 4, 5], [11, 12, 13, 14, 15], [21, 22, 23, 24, 25]])
    offsets = torch.tensor([0, 4, 5])
    column = torch.nested.nested_tensor_from_jagged(values, offsets=offsets, jagged_dim=2)
    return DataProto.from_dict({"position_ids": column})


def test_positions_of_three_axes_keep_their_rows() -> None:
    """Of two rows [3, 4] and [3, 1], the second one was [[2, 3]]."""
    data = positions()
    second = torch.tensor([[5.0], [15], [25]])
    both = DataProto.concat([data, data.select_idxs([1])])
    for batch in (both, pickle.loads(pickle.dumps(both)), both.writable()):
        rows = batch.batch["position_ids"].unbind()
        assert [list(row.shape) for row in rows] == [[3, 4], [3, 1], [3, 1]]
        assert rows[0][1].tolist() == [11, 12, 13, 14] and torch.equal(rows[1], second) and torch.equal(rows[2], second)
    assert torch.equal(data.slice(1, 2).batch["position_ids"].unbind()[0], second)
    other = DataProto.from_dict({"position_ids": torch.nested.nested_tensor([torch.zeros(3, 4)], layout=torch.jagged)})
    with pytest.raises(ProtocolError, match=r"jagged in the dimensions \[2, 1\]"):
        DataProto.concat([data, other])


def test_one_row_of_a_last_column_can_be_pickled() -> None:
    scores = torch.arange(32.0).reshape(4, 8)
    chunks = DataProto.from_dict({"score": scores[:, -1]}).chunk(4)
    assert [pickle.loads(pickle.dumps(chunk)).batch["score"].item() for chunk in chunks] == [7, 15, 23, 31]


def test_arguments_that_code_for_verl_passes() -> None:
    data = DataProto.from_dict({"x": torch.arange(5)}, {"name": list("abcde")})
    folded = TensorDict({"x": torch.zeros(2, 3, 4)}, batch_size=[2, 3])
    assert list(DataProto.from_tensordict(folded, num_batch_dims=1).batch.batch_size) == [2]
    copied = data.select(["x"], deepcopy=True)
    copied.batch["x"][0] = 9
    assert data.batch["x"][0] == 0


def test_columns_that_are_set_by_hand_become_object_columns() -> None:
    data = DataProto.from_dict({"x": torch.arange(2)})
    data.non_tensor_batch["reward"] = np.array([1.0, 2.0])  # type: ignore[assignment]
    data.non_tensor_batch["name"] = ["a", "b"]  # type: ignore[assignment]
    data.union(DataProto.from_dict(non_tensors={"reward": [1.0, 2.0]}))
    assert data.non_tensor_batch["reward"].dtype == object and data.non_tensor_batch["name"].tolist() == ["a", "b"]
    assert data[1:].non_tensor_batch["name"].tolist() == ["b"]


def test_metrics_that_are_lists_of_dicts_are_merged() -> None:
    parts = [DataProto(meta_info={"metrics": each}) for each in ([{"loss": 1.0}, {"loss": 2.0}], {"loss": 3})]
    assert DataProto.concat(parts).meta_info["metrics"] == {"loss": [1.0, 2.0, 3]}


def cycle() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


DATA = DataProto.from_dict({"x": torch.arange(4)})
MISUSE: dict[str, Callable[[], Any]] = {
    "text for a number of chunks": lambda: DATA.chunk("2"),  # type: ignore[arg-type]
    "a fraction of a chunk": lambda: DATA.chunk(1.5),  # type: ignore[arg-type]
    "no size of a split": lambda: DATA.split(None),  # type: ignore[arg-type]
    "text for repetitions": lambda: DATA.repeat("x"),  # type: ignore[arg-type]
    "a number for names": lambda: DATA.select(3),  # type: ignore[arg-type]
    "numbers for new names": lambda: DATA.rename(1, 2),  # type: ignore[arg-type]
    "a dict for a batch": lambda: DATA.union({}),  # type: ignore[arg-type]
    "numbers for batches": lambda: DataProto.concat([1, 2]),  # type: ignore[list-item]
    "a list for columns": lambda: DataProto(non_tensor_batch=[1]),  # type: ignore[arg-type]
    "a number for facts": lambda: DataProto(meta_info=3),  # type: ignore[arg-type]
    "a dict for a TensorDict": lambda: DataProto.from_tensordict({}),
    "text for bounds": lambda: DATA.slice("a"),  # type: ignore[arg-type]
    "a step of zero": lambda: DATA[::0],
    "a fact that contains itself": lambda: DataProto(meta_info={"x": cycle()}),
}


@pytest.mark.parametrize("what", MISUSE)
def test_misuse_is_a_protocol_error(what: str) -> None:
    with pytest.raises(ProtocolError):
        MISUSE[what]()


def test_containers_that_contain_themselves_can_be_compared() -> None:
    def column(last: int) -> np.ndarray[Any, Any]:
        array = np.empty(2, dtype=object)
        array[0], array[1] = cycle(), {"array": array, "last": last}
        return array

    assert equal(column(1), column(1)) and equal(cycle(), cycle())
    assert not equal(column(1), column(2)) and not equal(cycle(), [cycle(), 1])
    shared = [1]
    assert equal([shared, shared], [[1], [1]]) and not equal([shared, shared], [[1], [2]])
