import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_core.api import ProtocolError
from agentrl_core.protocol import DataProto
from agentrl_core.workers.micro_batching import (
    Columns,
    columns_of,
    empty_micro_batch,
    map_micro_batches,
    micro_batches,
    share_of_rows,
)
from agentrl_core.workers.ranks import TrainingRanks

CPU = torch.device("cpu")


def columns_with(lengths: list[tuple[int, int]], width_p: int = 9, width_r: int = 11) -> Columns:
    """Columns whose input ids say where they came from: 100 * row + position."""
    attention = torch.zeros(len(lengths), width_p + width_r, dtype=torch.long)
    for row, (prompt, response) in enumerate(lengths):
        attention[row, width_p - prompt : width_p + response] = 1
    ids = torch.arange(width_p + width_r) + 100 * torch.arange(len(lengths))[:, None]
    return {
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": ids,
        "responses": ids[:, width_p:],
        "response_mask": attention[:, width_p:].bool(),
    }


lengths_strategy = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 11)), min_size=1, max_size=12)


@settings(deadline=None)
@given(lengths=lengths_strategy, max_tokens=st.integers(1, 80))
def test_every_row_once_within_the_limit_and_nothing_but_padding_cut_off(lengths, max_tokens):
    columns = columns_with(lengths)
    micros = micro_batches(columns, max_tokens)
    assert sorted(row for micro in micros for row in micro.rows.tolist()) == list(range(len(lengths)))
    for micro in micros:
        assert micro.tokens <= max_tokens or len(micro.rows) == 1
        prompt = max(lengths[row][0] for row in micro.rows.tolist())
        response = max(max(lengths[row][1] for row in micro.rows.tolist()), 1)
        assert micro["input_ids"].shape == (len(micro.rows), prompt + response)
        assert torch.equal(micro["responses"], micro["input_ids"][:, prompt:])
        for place, row in enumerate(micro.rows.tolist()):
            kept = micro["input_ids"][place][micro["attention_mask"][place].bool()]
            assert torch.equal(kept, columns["input_ids"][row][columns["attention_mask"][row].bool()])


@settings(deadline=None)
@given(lengths=lengths_strategy, max_tokens=st.integers(1, 80))
def test_results_come_back_in_the_order_of_the_batch(lengths, max_tokens):
    columns = columns_with(lengths)

    def ids(micros):
        return [(micro["responses"],) for micro in micros]

    result = map_micro_batches(columns, max_tokens, CPU, ids, ("ids",))
    expected = torch.where(columns["response_mask"], columns["responses"], 0).float()
    assert torch.equal(result["ids"], expected)


def test_similar_rows_share_a_micro_batch():
    micros = micro_batches(columns_with([(9, 11), (1, 1), (9, 10), (2, 1)]), max_tokens=40)
    assert [sorted(micro.rows.tolist()) for micro in micros] == [[0, 2], [1, 3]]


def test_a_batch_without_rows_has_no_micro_batches_and_empty_results():
    columns = columns_with([])
    assert micro_batches(columns, 10) == []
    assert map_micro_batches(columns, 10, CPU, lambda micros: [], ("ids",))["ids"].shape == (0, 11)


def test_missing_columns_are_named():
    batch = DataProto.from_dict(tensors={"responses": torch.zeros(1, 1)})
    with pytest.raises(ProtocolError, match=r"update needs the columns .*'advantages'.*has \['responses'\]"):
        columns_of(batch, ("advantages",), "update")


class Place(TrainingRanks):
    """A rank among others that are not there."""


@settings(deadline=None)
@given(lengths=lengths_strategy, ranks=st.integers(1, 5))
def test_every_row_is_dealt_to_one_rank_and_ranks_get_about_as_many_tokens(lengths, ranks):
    columns = columns_with(lengths)
    shares = [share_of_rows(columns, Place(rank, ranks)).tolist() for rank in range(ranks)]
    assert sorted(row for share in shares for row in share) == list(range(len(lengths)))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    tokens = [sum(sum(lengths[row]) for row in share) for share in shares]
    assert max(tokens) - min(tokens) <= max(map(sum, lengths))


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6), ranks=st.integers(1, 4), data=st.data())
def test_ranks_share_all_rows_and_cut_few_groups_of_a_prompt(sizes, ranks, data):
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    lengths = [(4, data.draw(st.integers(0, 11))) for _ in groups]
    columns = columns_with(lengths)
    columns["input_ids"] = torch.tensor(groups).unsqueeze(1).expand(-1, 20)
    columns["position_ids"] = torch.arange(20).expand(len(groups), -1)
    shares = [share_of_rows(columns, Place(rank, ranks), by_prefix=True).tolist() for rank in range(ranks)]
    assert sorted(row for share in shares for row in share) == list(range(len(groups)))
    assert sum(len({groups[row] for row in share}) for share in shares) <= len(sizes) + ranks - 1


@pytest.mark.parametrize("rope_axes", [(), (3,)])
def test_a_micro_batch_for_a_rank_without_rows_has_nothing_to_train(rope_axes):
    columns = columns_with([(2, 3)])
    columns["position_ids"] = torch.zeros(1, *rope_axes, 20, dtype=torch.long)
    columns["advantages"] = torch.ones(1, 11)
    micro = empty_micro_batch({name: column[:0] for name, column in columns.items()})
    assert len(micro.rows) == 0 and micro.tokens == 2
    assert micro["attention_mask"].all() and not micro["response_mask"].any() and not micro["advantages"].any()
    assert micro["position_ids"].shape == (1, *rope_axes, 2) and micro["responses"].shape == (1, 1)
