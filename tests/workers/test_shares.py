"""Which rows a rank is sent for an update, against ranks that have all rows and choose."""

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl_core.api.errors import ProtocolError
from agentrl_core.api.training_backend import DataShare
from agentrl_core.protocol import DataProto
from agentrl_core.workers.micro_batching import columns_of, narrowed, rank_of_rows, take
from agentrl_core.workers.model_worker import BALANCED
from agentrl_core.workers.shares import SHARE, SHARED, Sharing, share_of, shared_out
from agentrl_core.workers.update import Share
from tests.workers.test_sent_rows import NAMES, batch

ROWS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=12)


def of(rows: list[tuple[int, int]]) -> DataProto:
    made = narrowed(batch(rows), NAMES)
    # Half of the rows have no advantage.
    made.batch["advantages"][::2] = 0.0
    return made


def expected(whole: DataProto, sharing: Sharing, size: int) -> list[list[set[int]]]:
    """By epoch and rank, the rows: as every rank chose them when it had them all."""
    columns = columns_of(whole, ("advantages",), "update")
    trained = columns["response_mask"].any(-1)
    moving = (columns["advantages"] != 0).any(-1) if sharing.leaves_out else trained
    found = []

    def chosen(rows: torch.Tensor) -> list[set[int]]:
        ranks = rank_of_rows(take(columns, rows), size, sharing.by_prefix)
        return [set(rows[ranks == rank].tolist()) for rank in range(size)]

    if not moving.any() or whole.meta_info.get("measure_only"):
        return [chosen(torch.arange(len(whole)))]
    generator = torch.Generator().manual_seed(whole.meta_info["seed"])
    rows_M = trained.nonzero().squeeze(-1)
    for _ in range(sharing.epochs):
        parts = rows_M[torch.randperm(len(rows_M), generator=generator)].tensor_split(
            min(sharing.mini_batches, len(rows_M))
        )
        of_epoch: list[set[int]] = [set() for _ in range(size)]
        for rows in parts:
            for moves in (False, True):
                for rank, more in enumerate(chosen(rows[moving[rows] == moves])):
                    of_epoch[rank] |= more
        found.append(of_epoch)
    return found


@given(ROWS, st.booleans(), st.booleans(), st.booleans(), st.integers(2, 4))
def test_a_rank_gets_the_rows_that_it_would_have_chosen(
    rows: list[tuple[int, int]], by_prefix: bool, leaves_out: bool, measures: bool, size: int
) -> None:
    whole = of(rows)
    whole.meta_info["measure_only"] = measures
    sharing = Sharing(DataShare(), by_prefix, 2, 3, leaves_out)
    epochs = expected(whole, sharing, size)
    for rank, sent in enumerate(shared_out(size, whole, sharing)):
        arrived = pickle.loads(pickle.dumps(sent))
        share = share_of(arrived, {})
        assert [set((ranks == rank).nonzero().squeeze(-1).tolist()) for ranks in share.ranks_EB] == [
            epoch[rank] for epoch in epochs
        ]
        assert share.rows.tolist() == sorted(set().union(*(epoch[rank] for epoch in epochs)))
        alone = share_of(whole, columns_of(whole, (), "update"))
        for name in ("sampled_B", "lengths_B", "groups_B"):
            assert torch.equal(getattr(share, name), getattr(alone, name)), name
        if len(share.rows):
            columns = columns_of(arrived, ("advantages",), "update")
            everything = columns_of(whole, ("advantages",), "update")
            mine = share.rows.flip(0)
            for name, column in share.take(columns, mine).items():
                assert torch.equal(column, everything[name][mine]), name


def test_a_batch_without_advantages_is_refused_with_what_it_has() -> None:
    whole = of([(2, 3), (4, 1)])
    del whole.batch["advantages"]
    with pytest.raises(ProtocolError, match=r"update needs the columns \['advantages'\], the batch has \['attention_"):
        shared_out(2, whole, Sharing(leaves_out=True))


def test_what_is_sent_to_all_ranks_is_the_batch_once() -> None:
    whole = of([(300, 400)] * 40 + [(300, 4_000)] * 8)
    whole.meta_info["temperature"] = 1.0
    sizes = [len(pickle.dumps(sent)) for sent in shared_out(4, whole, Sharing(mini_batches=4))]
    tokens = 48 * 300 * 4 + (40 * 400 + 8 * 4_000) * 13
    assert tokens < sum(sizes) < 1.1 * tokens


@pytest.mark.parametrize("all_rows", [True, False])
def test_all_rows_go_to_all_ranks_where_each_must_have_them(all_rows: bool) -> None:
    class Group:
        auto_padding = False
        world_size = 2

        def sharing(self) -> list[Any]:
            return [Sharing(DataShare(rank, 2), all_rows=all_rows) for rank in range(2)]

    whole = of([(2, 3)] * 4)
    sent = [call[0][0] for call in SHARED.plan(Group(), (whole,), {}).calls]
    assert [len(each) for each in sent] == ([4, 4] if all_rows else [2, 2])
    assert all((SHARE in each.meta_info) != all_rows for each in sent)
    assert all(isinstance(each.meta_info.get(SHARE), Share | None) for each in sent)


def test_ranks_that_compute_the_same_get_the_same_rows_and_one_of_them_counts(make_batch: Any) -> None:
    """Two parts over four ranks: of each pair the second one counts, as the last stage of a pipeline does."""

    class Group:
        world_size = 4

        def sharing(self) -> list[Any]:
            return [Sharing(DataShare(rank // 2, 2, counts=bool(rank % 2))) for rank in range(4)]

    whole = make_batch([([2, 3], [4 + row], [1]) for row in range(5)])
    whole.batch["number"] = torch.arange(5)
    for mode in (SHARED, BALANCED):
        plan = mode.plan(Group(), (whole,), {})
        numbers = [call[0][0].batch["number"].tolist() for call in plan.calls]
        assert numbers[0] == numbers[1] and numbers[2] == numbers[3]
        assert sorted(numbers[0] + numbers[2]) == list(range(5))
    assert plan.result_ranks == [1, 3]
    results = [DataProto.from_dict({"number": torch.tensor(numbers[rank])}) for rank in plan.result_ranks]
    assert plan.collect(results).batch["number"].tolist() == list(range(5))
