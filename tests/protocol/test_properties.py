"""Laws of DataProto over random schemas."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from agentrl_core.api.errors import ProtocolError
from agentrl_core.controller import ClassWithInitArgs, Dispatch, LocalWorkerGroup, Worker, register
from agentrl_core.protocol import DataProto
from agentrl_core.protocol.containers import equal

DTYPES = [torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.uint8]
quick = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def batches(draw: st.DrawFn) -> DataProto:
    rows = draw(st.integers(0, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def dense() -> torch.Tensor:
        shape = [rows, *draw(st.lists(st.integers(0, 3), max_size=2))]
        return (torch.randn(shape, generator=generator) * 9).to(draw(st.sampled_from(DTYPES)))

    def jagged() -> torch.Tensor:
        lengths = torch.randint(0, 4, [rows], generator=generator)
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        return torch.nested.nested_tensor_from_jagged(torch.randn(int(lengths.sum()), generator=generator), offsets)

    def nested() -> torch.Tensor:
        lengths = torch.randint(0, 4, [rows], generator=generator).tolist()
        return torch.nested.nested_tensor([torch.ones(length, 2) * i for i, length in enumerate(lengths)])

    makers = {"dense": dense, "jagged": jagged, "inside": lambda: TensorDict({"leaf": dense()}, [rows])}
    if rows:
        makers["nested"] = nested
    kinds = draw(st.none() | st.lists(st.sampled_from(sorted(makers)), max_size=4))
    td = None if kinds is None else TensorDict({f"{k}{i}": makers[k]() for i, k in enumerate(kinds)}, [rows])
    names = draw(st.lists(st.sampled_from("opq"), unique=True))
    columns = {name: draw(st.lists(values, min_size=rows, max_size=rows)) for name in names}
    return DataProto(td, columns, draw(st.dictionaries(st.sampled_from("mno"), values, max_size=3)))


def assert_same(left: DataProto, right: DataProto) -> None:
    assert len(left) == len(right)
    assert (left.batch is None) == (right.batch is None)
    if left.batch is not None:
        assert left.batch.batch_size == right.batch.batch_size
        assert equal(dict(left.batch.items()), dict(right.batch.items()))
    assert equal(left.non_tensor_batch, right.non_tensor_batch)
    assert equal(left.meta_info, right.meta_info)


def columns_of(data: DataProto) -> dict[str, object]:
    return {} if data.batch is None else dict(data.batch.items())


def rows_of(data: DataProto) -> list[tuple[object, object]]:
    return [(None if item.batch is None else dict(item.batch.items()), item.non_tensor_batch) for item in data]


def assert_rows(data: DataProto, source: DataProto, order: list[int]) -> None:
    rows = rows_of(source)
    assert equal(rows_of(data), [rows[row] for row in order])


@quick
@given(batches(), st.integers(1, 9))
def test_concat_of_chunks_and_of_splits_is_the_batch(data: DataProto, number: int) -> None:
    chunks = data.chunk(number)
    assert len(chunks) == number and max(map(len, chunks)) - min(map(len, chunks)) <= 1
    assert_same(DataProto.concat(chunks), data)
    assert_same(DataProto.concat(data.split(number)), data)


def test_large_columns_are_concatenated_like_small_ones() -> None:
    for dtype in DTYPES:
        data = DataProto.from_dict({"x": (torch.arange(6 * 2**20) % 7).to(dtype).reshape(-1, 2)})
        assert_same(DataProto.concat(data.chunk(3)), data)
    weights = torch.ones(2**20, 2, requires_grad=True)
    DataProto.concat([DataProto.from_dict({"x": weights}), DataProto.from_dict({"x": weights})]).batch[
        "x"
    ].sum().backward()
    assert weights.grad is not None and bool((weights.grad == 2).all())


@quick
@given(batches(), st.integers(1, 4))
def test_every_operation_takes_every_batch(data: DataProto, number: int) -> None:
    size = len(data)
    rows = list(range(size))
    assert_same(data.writable(), data)
    assert_same(data.select(), data)
    assert_same(data.slice().to("cpu"), data)
    assert data.nbytes() >= 0 and f"{size} rows" in data.get_data_info()
    data.check_consistency()
    assert_rows(data[::-1], data, rows[::-1])
    names = [*(data.batch.keys() if data.batch is not None else ()), *data.non_tensor_batch]
    renamed = data.slice().rename(names, [f"new {name}" for name in names])
    assert_same(renamed.rename([f"new {name}" for name in names], names), data)
    kept = data.slice()
    popped = kept.pop(list(data.batch.keys()) if data.batch is not None else None, list(data.non_tensor_batch))
    assert not kept.non_tensor_batch and popped.non_tensor_batch.keys() == data.non_tensor_batch.keys()
    if not set(data.non_tensor_batch) & set(data.meta_info) and (data.batch is not None or data.non_tensor_batch):
        again = DataProto.from_tensordict(data.to_tensordict())
        assert equal(again.non_tensor_batch, data.non_tensor_batch) and equal(again.meta_info, data.meta_info)
        assert len(again) == size


@quick
@given(batches(), batches())
def test_union_has_all_columns_of_both_or_changes_nothing(left: DataProto, right: DataProto) -> None:
    before, other = left.writable(), right.writable()
    try:
        left.union(right)
    except ProtocolError:
        assert_same(left, before)
    else:
        for part in (before, other):
            assert all(equal(left.non_tensor_batch[key], column) for key, column in part.non_tensor_batch.items())
            assert all(equal(left.batch[key], column) for key, column in columns_of(part).items())
            assert all(equal(left.meta_info[key], value) for key, value in part.meta_info.items())
        assert_same(left.slice().union(right), left)
    assert_same(right, other)


@quick
@given(batches(), st.integers(1, 4))
def test_worker_groups_give_every_batch_back_as_it_was(data: DataProto, ranks: int) -> None:
    class Echo(Worker):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def echo(self, batch: DataProto) -> DataProto:
            return batch

    with LocalWorkerGroup(ClassWithInitArgs(Echo), ranks) as group:
        assert_same(group.echo(data), data)


@quick
@given(batches(), st.data())
def test_rows_are_chosen_as_numpy_chooses_them(data: DataProto, draw: st.DataObject) -> None:
    size = len(data)
    numbers = np.arange(size)
    chosen = draw.draw(st.lists(st.integers(-size, size - 1), max_size=8) if size else st.just([]))
    mask = draw.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    cut = draw.draw(st.slices(size))
    times = draw.draw(st.integers(0, 3))
    assert_rows(data[chosen], data, numbers[np.array(chosen, dtype=int)].tolist())
    assert_rows(data[np.array(mask, dtype=bool)], data, numbers[np.array(mask, dtype=bool)].tolist())
    assert_rows(data[cut], data, numbers[cut].tolist())
    assert_rows(data.repeat(times), data, numbers.repeat(times).tolist())
    assert_rows(data.repeat(times, interleave=False), data, np.tile(numbers, times).tolist())
    order = draw.draw(st.permutations(range(size)))
    assert_rows(data.slice().reorder(order), data, order)


@quick
@given(batches())
def test_pickle_round_trips(data: DataProto) -> None:
    buffers: list[pickle.PickleBuffer] = []
    payload = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    assert_same(pickle.loads(payload, buffers=[bytes(buffer) for buffer in buffers]), data)
    assert_same(pickle.loads(pickle.dumps(data, protocol=4)), data)


@quick
@given(batches())
def test_union_with_itself_and_with_its_parts_is_the_batch(data: DataProto) -> None:
    assert_same(data.slice().union(data), data)
    tensors = data.select(non_tensor_batch_keys=[])
    assert equal(tensors.union(data.select(batch_keys=[])).non_tensor_batch, data.non_tensor_batch)


@quick
@given(batches())
def test_no_operation_shares_a_container_with_its_input(data: DataProto) -> None:
    before = data.writable()
    outputs = [data[:], data.select(), data.repeat(2), data.writable(), *data.chunk(2), DataProto.concat([data])]
    outputs.append(DataProto(data.batch, data.non_tensor_batch, data.meta_info))
    outputs += [DataProto().union(data), data.slice().pop([], list("opq"[:0]))]
    for output in outputs:
        for column in output.non_tensor_batch.values():
            column[:] = "changed"
        output.non_tensor_batch.clear()
        if output.batch is not None:
            output.batch["new"] = torch.zeros(len(output))
        for value in output.meta_info.values():
            if isinstance(value, dict | list):
                value.clear()
        output.meta_info.clear()
    assert_same(data, before)


@st.composite
def rows_with_images(draw: st.DrawFn) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Of each row its positions [3, tokens], and what a processor made of its images."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    made = []
    for length in draw(st.lists(st.integers(1, 6), min_size=1, max_size=6)):
        patches = draw(st.integers(0, 3))
        inputs = {"pixel_values": torch.randn(patches, 4, generator=generator), "grid": torch.tensor([[1, 1, patches]])}
        made.append((torch.randint(0, 99, (3, length), generator=generator), inputs if patches else {}))
    return made


def with_images(rows: list[tuple[torch.Tensor, dict[str, torch.Tensor]]]) -> DataProto:
    positions = torch.nested.nested_tensor([positions for positions, _ in rows])
    return DataProto.from_dict({"position_ids": positions}, {"multi_modal_inputs": [inputs for _, inputs in rows]})


def assert_images(data: DataProto, rows: list[tuple[torch.Tensor, dict[str, torch.Tensor]]]) -> None:
    assert len(data) == len(rows)
    found = zip(data.batch["position_ids"].unbind(), data.non_tensor_batch["multi_modal_inputs"], strict=True)
    for (positions, inputs), (own_positions, own_inputs) in zip(found, rows, strict=True):
        assert torch.equal(positions, own_positions)
        assert inputs.keys() == own_inputs.keys()
        assert all(torch.equal(inputs[name], own_inputs[name]) for name in inputs)


@quick
@given(rows_with_images(), st.data())
def test_positions_of_three_axes_and_inputs_of_images_stay_with_their_rows(rows: list, draw: st.DataObject) -> None:
    data, size = with_images(rows), len(rows)
    assert_images(data, rows)
    chosen = draw.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8))
    assert_images(data.select_idxs(chosen), [rows[number] for number in chosen])
    order = draw.draw(st.permutations(range(size)))
    assert_images(data.slice().reorder(order), [rows[number] for number in order])
    times = draw.draw(st.integers(1, 3))
    assert_images(data.repeat(times), [row for row in rows for _ in range(times)])
    assert_images(data.repeat(times, interleave=False), rows * times)
    parts = draw.draw(st.integers(1, size))
    chunks = data.chunk(parts)
    assert_images(DataProto.concat(chunks), rows)
    assert_images(DataProto.concat(chunks[::-1]), [row for part in reversed(_cut(rows, chunks)) for row in part])
    assert_images(DataProto.concat(data.split(parts)), rows)
    assert_images(data.slice().union(data), rows)
    columns = data.select(["position_ids"], []).union(data.select([], ["multi_modal_inputs"]))
    assert_images(columns, rows)
    assert_images(pickle.loads(pickle.dumps(data)), rows)
    buffers: list[pickle.PickleBuffer] = []
    payload = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    assert_images(pickle.loads(payload, buffers=[bytes(buffer) for buffer in buffers]), rows)
    assert_images(DataProto.from_tensordict(data.to_tensordict()), rows)
    assert_images(data.writable(), rows)


def _cut(rows: list, parts: list[DataProto]) -> list[list]:
    ends = np.cumsum([0, *map(len, parts)])
    return [rows[start:end] for start, end in zip(ends, ends[1:], strict=False)]


@quick
@given(rows_with_images(), st.data())
def test_a_union_notices_other_images(rows: list, draw: st.DataObject) -> None:
    row = draw.draw(st.integers(0, len(rows) - 1))
    other = [(positions, dict(inputs)) for positions, inputs in rows]
    other[row][1]["pixel_values"] = torch.full((1, 4), 7.0)
    data = with_images(rows)
    with pytest.raises(ProtocolError, match="multi_modal_inputs"):
        data.union(with_images(other))
    assert_images(data, rows)
