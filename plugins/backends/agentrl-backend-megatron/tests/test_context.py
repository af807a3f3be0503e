"""Rows that are split over ranks, and what becomes of their log-probs."""

import pytest
import torch

from agentrl_backend_megatron.context import gathered, own_positions
from agentrl_testing.ranks import on_ranks

HOST = torch.device("cpu")


def test_one_rank_has_rows_of_any_length() -> None:
    assert own_positions(5, 0, 1, HOST).tolist() == [0, 1, 2, 3, 4]


def test_a_rank_has_a_chunk_from_both_ends() -> None:
    assert own_positions(16, 1, 4, HOST).tolist() == [2, 3, 12, 13]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_have_each_token_once_and_as_much_to_attend_to(size: int) -> None:
    parts = [own_positions(4 * size, rank, size, HOST) for rank in range(size)]
    assert sorted(torch.cat(parts).tolist()) == list(range(4 * size))
    assert len({int((part + 1).sum()) for part in parts}) == 1


def test_every_rank_gets_all_values_and_its_own_gradient() -> None:
    for rank, (values, gradient) in enumerate(on_ranks(2, _gathered)):
        assert values.tolist() == [10.0, 0.0, 11.0, 20.0]
        assert gradient.tolist() == [[2.0], [1.0, 3.0, 4.0]][rank]


def _gathered(rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    is_own = torch.tensor([False, True, False, False]) if rank == 0 else torch.tensor([True, False, True, True])
    values = (torch.tensor([0.0]) if rank == 0 else torch.tensor([10.0, 11.0, 20.0])).requires_grad_()
    found = gathered(values, is_own, None)
    (found * torch.arange(1.0, 5)).sum().backward()
    assert values.grad is not None
    return found.detach(), values.grad
