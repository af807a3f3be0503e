"""Columns without padding, against the same columns padded."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agentrl_core.protocol import DataProto
from agentrl_core.protocol.ragged import (
    Few,
    Filled,
    Order,
    RaggedColumn,
    Rows,
    Runs,
    Values,
    converted,
    like,
    on_values,
    ragged,
    under,
)
from agentrl_core.protocol.rows import counts

PAD = 9
LENGTHS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=6)


def batch(lengths: list[tuple[int, int]], seed: int = 0) -> tuple[DataProto, dict[str, Tensor]]:
    """A batch of all kinds of columns, and the same columns padded row by row."""
    chance = np.random.default_rng(seed)
    prompts_B, responses_B = (np.array(each, dtype=np.int64) for each in zip(*lengths, strict=True))
    left, width, total = int(prompts_B.max()), int(responses_B.max()), int(responses_B.sum())
    whole = Rows(prompts_B + responses_B, left + width, left - prompts_B)
    response = Rows.of(responses_B, width)
    flat = chance.integers(10, 99, whole.size).astype(np.int32)
    ids = RaggedColumn(Values(flat), whole, PAD)
    runs = [part for length in responses_B.tolist() for part in (length // 2, length - length // 2)]
    kinds = chance.integers(0, 3, len(runs))
    places = chance.permutation(total)[: total // 3]
    few, values = chance.random(len(places)).astype(np.float32), chance.random(total).astype(np.float32)
    made = DataProto.from_dict({
        "prompts": ids.part(0, left), "responses": ids.part(left, width), "input_ids": ids,
        "attention_mask": RaggedColumn(Filled(np.int8), whole), "position_ids": RaggedColumn(Order(), whole),
        "turn_ids": RaggedColumn(Runs(kinds, runs, np.int32), response, -1),
        "response_mask": RaggedColumn(Runs(kinds > 0, runs, np.bool_), response),
        "rewards": RaggedColumn(Few(places, few), response), "log_probs": RaggedColumn(Values(values), response),
        "scores": torch.from_numpy(chance.random(len(lengths))),
    })  # fmt: skip
    rewards = np.zeros(total, np.float32)
    rewards[places] = few
    of_turns = np.repeat(kinds, runs)
    of_responses = {"turn_ids": (of_turns, -1), "response_mask": (of_turns > 0, 0), "rewards": (rewards, 0),
                    "log_probs": (values, 0)}  # fmt: skip
    rows: dict[str, list[Any]] = {name: [] for name in made.batch.keys() if name != "scores"}
    start = end = 0
    for prompt, answer in lengths:
        before, behind, last = left - prompt, width - answer, max(prompt + answer - 1, 0)
        rows["input_ids"].append([PAD] * before + flat[end : end + prompt + answer].tolist() + [PAD] * behind)
        rows["attention_mask"].append([0] * before + [1] * (prompt + answer) + [0] * behind)
        rows["position_ids"].append([0] * before + list(range(prompt + answer)) + [last] * behind)
        for name, (column, fill) in of_responses.items():
            rows[name].append(column[start : start + answer].tolist() + [fill] * behind)
        start, end = start + answer, end + prompt + answer
    padded = {
        name: torch.tensor(column, dtype=made.batch[name].dtype).reshape(len(lengths), -1)
        for name, column in rows.items()
        if column
    }
    padded["prompts"], padded["responses"] = padded["input_ids"][:, :left], padded["input_ids"][:, left:]
    return made, padded | {"scores": made.batch["scores"]}


def check(found: DataProto, expected: dict[str, Tensor]) -> None:
    """The columns are the expected ones, and looking at them has not padded them for good."""
    assert set(found.batch.keys()) == set(expected)
    for name, column in expected.items():
        assert found.batch[name].dtype == column.dtype, name
        assert torch.equal(found.batch[name], column), name
        assert name == "scores" or ragged(found.batch[name]) is not None, name


@given(LENGTHS, st.data())
def test_rows_are_chosen_joined_and_sent_without_padding(lengths: list[tuple[int, int]], data: st.DataObject) -> None:
    made, padded = batch(lengths)
    check(made, padded)
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), max_size=5))
    chosen = {name: column[rows] for name, column in padded.items()}
    check(made.select_idxs(rows), chosen)
    again = made.select_idxs(rows).select_idxs(list(range(len(rows)))[::-1])
    check(again, {name: column.flip(0) for name, column in chosen.items()})
    check(made[1:3], {name: column[1:3] for name, column in padded.items()})
    check(made.repeat(2), {name: column.repeat_interleave(2, 0) for name, column in padded.items()})
    both = DataProto.concat([made, made.select_idxs(rows)])
    check(both, {name: torch.cat([column, chosen[name]]) for name, column in padded.items()})
    check(pickle.loads(pickle.dumps(both[1:])), {name: torch.cat([column, chosen[name]])[1:] for name, column in
                                                 padded.items()})  # fmt: skip
    check(made.writable(), padded)
    mask = made.batch["response_mask"]
    assert counts(mask).tolist() == padded["response_mask"].sum(-1).tolist()
    assert torch.equal(under(mask, made.batch["log_probs"])[0], padded["log_probs"][padded["response_mask"]])
    sums = on_values(torch.add, made.batch["log_probs"], made.batch["rewards"])
    assert ragged(sums) is not None and torch.equal(sums, padded["log_probs"] + padded["rewards"])
    assert torch.equal(converted(made.batch["turn_ids"], torch.int64), padded["turn_ids"].long())
    assert torch.equal(like(mask, padded["log_probs"]), padded["log_probs"])


OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda column: column.sum(-1),
    "where": lambda column: torch.where(column > 0.5, column, 0.0),
    "numpy": lambda column: column.numpy(),
    "asarray": np.asarray,
    "list": lambda column: column.tolist(),
    "rows": lambda column: column[torch.tensor([2, 0])],
    "last row": lambda column: column[torch.tensor([-1])],
    "mask of rows": lambda column: column[torch.tensor([True, False, True])],
    "uint8 mask of rows": lambda column: column[torch.tensor([1, 0, 1], dtype=torch.uint8)],
    "other shape": lambda column: column.reshape(-1),
    "strides": lambda column: column.stride(),
    "dlpack": lambda column: torch.from_dlpack(column),
    "shared memory": lambda column: column.share_memory_().sum(),
    "has an address": lambda column: column.data_ptr() != 0,
    "values": lambda column: column[column > 0.5],
    "row": lambda column: column[1],
    "slice": lambda column: column[:, 1:],
    "joined": lambda column: torch.cat([column, column]),
    "copy": copy.deepcopy,
    "type": lambda column: column.double(),
    "text": repr,
    "pickle": lambda column: pickle.loads(pickle.dumps(column)),
}


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("column", ["log_probs", "responses"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_whoever_computes_with_a_column_sees_a_padded_tensor(name: str, column: str) -> None:
    made, padded = batch([(1, 2), (0, 4), (2, 0)])
    found, expected = (OPERATIONS[name](columns[column]) for columns in (made.batch, padded))
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor) and found.dtype == expected.dtype and torch.equal(found, expected)
    else:
        assert np.array_equal(found, expected) if isinstance(expected, np.ndarray) else found == expected


@pytest.mark.parametrize(
    "choose",
    [
        lambda column: column[torch.tensor([-4])],
        lambda column: column[torch.tensor([3])],
        lambda column: column[torch.tensor([True, False])],
        lambda column: column.index_select(0, torch.tensor([-1])),
    ],
)
def test_rows_that_are_not_there_are_an_error(choose: Callable[[Tensor], Tensor]) -> None:
    made, padded = batch([(1, 2), (0, 4), (2, 0)])
    for columns in (padded, made.batch):
        with pytest.raises(IndexError):
            choose(columns["log_probs"])


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda column: column.__setitem__((0, 1), 77),
    "beyond the row": lambda column: column.__setitem__((2, 3), 77),
    "in place": lambda column: column.add_(1),
    "row": lambda column: column[1].fill_(77),
    "slice": lambda column: column[:, :2].zero_(),
    "numpy": lambda column: column.numpy().__setitem__(0, 77),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_stays_and_shows_where_it_did(name: str) -> None:
    """As for prompts and responses that are views of one tensor; rows, pickles and joined batches have it too."""
    made, padded = batch([(1, 2), (0, 4), (2, 0)])
    rows = made.select_idxs([0, 1, 2])
    WRITES[name](made.batch["responses"])
    check(rows, dict(padded))
    WRITES[name](padded["responses"])
    for column in ("prompts", "responses", "input_ids"):
        assert torch.equal(made.batch[column], padded[column])
    for found in (
        made.select_idxs([2, 1]),
        pickle.loads(pickle.dumps(made))[[2, 1]],
        DataProto.concat([made, made])[[5, 4]],
    ):
        assert torch.equal(found.batch["responses"], padded["responses"][[2, 1]])
    assert ragged(made.batch["log_probs"]) is not None


def test_bytes_are_those_of_values_and_pickles_have_no_padding() -> None:
    made, _ = batch([(3, 5)] * 50 + [(3, 5000)])
    values = 50 * 5 + 5000
    assert made.nbytes() < 10 * 4 * (values + 51 * 3)
    assert len(pickle.dumps(made)) < 10 * 4 * (values + 51 * 3) + 10_000 < made.batch["log_probs"].padded().nbytes
