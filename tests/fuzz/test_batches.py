"""Any sequence of operations on a batch gives what the same operations give on a list of rows."""

import pickle
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl_compat_verl.dispatch import DataProtoFuture, Dispatch, register
from agentrl_compat_verl.groups import LocalWorkerGroup, Worker
from agentrl_compat_verl.protocol import DataProto, pad_dataproto_to_divisor
from agentrl_core.controller import ClassWithInitArgs
from tests.fuzz.fuzzing import fuzz

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
]  # fmt: skip
Rows = list[dict[str, Any]]
"""The naive model: per row the values of its columns as Python lists."""


@st.composite
def tensors(draw: st.DrawFn, rows: int) -> torch.Tensor:
    """Dense with any dtype and stride, or jagged in one or two dimensions."""
    dtype = draw(st.sampled_from(DTYPES))
    kind = draw(st.sampled_from(["plain", "transposed", "every other", "expanded", "jagged", "ragged"]))
    width = draw(st.integers(0, 3))
    if kind == "jagged":
        lengths = torch.tensor(draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows)), dtype=torch.int64)
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        return torch.nested.nested_tensor_from_jagged(filled((int(lengths.sum()),), dtype), offsets)
    if kind == "ragged" and rows:
        shapes = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=rows, max_size=rows))
        return torch.nested.nested_tensor([filled(shape, torch.float32) for shape in shapes])
    if kind == "transposed":
        return filled((width, rows), dtype).t()
    if kind == "every other":
        return filled((2 * rows, width), dtype)[::2]
    if kind == "expanded":
        return filled((1, width), dtype).expand(rows, width)
    return filled((rows, width), dtype)


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()) % 5).reshape(shape).to(dtype)


@st.composite
def batches(draw: st.DrawFn, rows: st.SearchStrategy[int] = st.integers(0, 6)) -> DataProto:  # noqa: B008
    size = draw(rows)
    columns = {name: draw(tensors(size)) for name in draw(st.lists(st.sampled_from("abc"), unique=True))}
    objects = st.none() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
    lists = {"o": draw(st.lists(objects, min_size=size, max_size=size))}
    return DataProto.from_dict({**columns, "n": torch.arange(size)}, lists, {"step": 1})


def modelled(data: DataProto) -> Rows:
    return [
        {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in entries(item)}
        for item in data
    ]


def entries(item: Any) -> list[tuple[str, Any]]:
    return [*((name, _unnested(value)) for name, value in item.batch.items()), *item.non_tensor_batch.items()]


def _unnested(value: torch.Tensor) -> Any:
    return [list(value.shape), value.reshape(-1).tolist()] if not value.is_nested else value.tolist()


@st.composite
def operated(draw: st.DrawFn) -> tuple[DataProto, Rows, list[str]]:
    """A batch after some operations, the model after the same ones, and their names."""
    data = draw(batches())
    rows, names = modelled(data), list[str]()
    for _ in range(draw(st.integers(1, 6))):
        size, name = len(rows), draw(st.sampled_from(OPERATIONS))
        names.append(name)
        if name == "slice":
            cut = draw(st.slices(size))
            data, rows = data[cut], rows[cut]
        elif name == "choose" and size:
            chosen = draw(st.lists(st.integers(0, size - 1), max_size=6))
            data, rows = data.select_idxs(chosen), [rows[number] for number in chosen]
        elif name == "reorder":
            order = draw(st.permutations(range(size)))
            data, rows = data.slice().reorder(torch.tensor(order, dtype=torch.int64)), [rows[each] for each in order]
        elif name == "repeat" and size < 20:
            times, interleave = draw(st.integers(0, 3)), draw(st.booleans())
            data = data.repeat(times, interleave)
            rows = [row for row in rows for _ in range(times)] if interleave else rows * times
        elif name == "pad":
            padded, added = pad_dataproto_to_divisor(data, draw(st.integers(1, 4)))
            rows = [*rows, *(rows[number % size] for number in range(added))] if size else rows
            data = padded
        elif name == "pickle":
            data = pickle.loads(pickle.dumps(data, protocol=draw(st.sampled_from([4, 5]))))
        elif name == "rename":
            data = data.slice().rename(["o"], ["p"]).rename(["p"], ["o"])
        elif name == "select":
            keep = draw(st.lists(st.sampled_from(sorted(data.batch.keys())), unique=True, min_size=1))
            data, rows = data.select(keep, ["o"]), [{k: v for k, v in row.items() if k in {*keep, "o"}} for row in rows]
            if "n" not in keep:
                return data, rows, names
    return data, rows, names


OPERATIONS = ["slice", "choose", "reorder", "repeat", "pad", "pickle", "rename", "select"]


@fuzz
@given(operated())
def test_operations_do_what_they_do_to_a_list(case: tuple[DataProto, Rows, list[str]]) -> None:
    data, rows, names = case
    assert modelled(data) == rows, f"after {', '.join(names)}"
    data.check_consistency()


@fuzz
@given(batches(), st.integers(1, 5))
def test_chunks_are_the_rows_in_their_order(data: DataProto, number: int) -> None:
    rows = modelled(data)
    chunks = [modelled(chunk) for chunk in data.chunk(number)]
    assert [row for chunk in chunks for row in chunk] == rows
    assert len(chunks) == number and max(map(len, chunks)) - min(map(len, chunks)) <= 1
    assert modelled(DataProto.concat(data.chunk(number))) == rows


@fuzz
@given(batches())
def test_disk_gives_back_what_it_got(tmp_path: Path, data: DataProto) -> None:
    data.save_to_disk(tmp_path / "batch")
    again = DataProto.load_from_disk(tmp_path / "batch")
    assert modelled(again) == modelled(data)
    assert {name: column.dtype for name, column in again.batch.items()} == {
        name: column.dtype for name, column in data.batch.items()
    }


class Numbering(Worker):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def echo(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def some(self, batch: DataProto, every: int) -> DataProto:
        """Every so manieth row of this rank: parts of other lengths than those that came."""
        return batch[::every]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def both(self, left: DataProto, right: DataProto) -> DataProto:
        return DataProto.from_dict({"sum": left.batch["n"] + right.batch["n"]})


@fuzz
@given(batches(st.integers(0, 13)), st.integers(1, 5), st.integers(1, 5), st.booleans(), st.integers(1, 3))
def test_futures_reach_the_next_group_as_the_batch_would(
    data: DataProto, first: int, second: int, padding: bool, every: int
) -> None:
    with (
        LocalWorkerGroup(ClassWithInitArgs(Numbering), first) as one,
        LocalWorkerGroup(ClassWithInitArgs(Numbering), second) as two,
    ):
        one.auto_padding = two.auto_padding = padding
        future = one.echo(data)
        assert isinstance(future, DataProtoFuture)
        assert modelled(two.echo(future).get()) == modelled(data)
        expected = (2 * data.batch["n"]).tolist()
        for left, right in ((future, data), (data, future), (future, one.echo(data))):
            assert two.both(left, right).batch["sum"].tolist() == expected
        if not padding and len(data) >= first:
            uneven = one.some(data, every)
            kept = [row for chunk in data.chunk(first) for row in modelled(chunk)[::every]]
            assert modelled(two.echo(uneven).get()) == kept
