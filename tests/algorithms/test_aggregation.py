import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_core.algorithms.aggregation import Aggregation, aggregate, denominator
from agentrl_core.config import schema

MODES = get_args(Aggregation)
LOSSES = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]).bool()


def total(losses, mask, mode, max_response_length=10):
    return aggregate(losses, mask, mode, denominator(mask, mode, max_response_length))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (1 + 2 + 4) / 3),
        ("token-sum", 1 + 2 + 4),
        ("seq-mean-token-sum", (3 + 4) / 2),
        ("seq-mean-token-mean", (1.5 + 4) / 2),
        ("seq-mean-token-sum-norm", (3 + 4) / (2 * 10)),
    ],
)
def test_known_values_where_an_empty_row_has_no_vote(mode, expected):
    assert float(total(LOSSES, MASK, mode)) == pytest.approx(expected)


def test_the_config_offers_the_same_modes():
    assert get_args(schema.Aggregation) == MODES


@pytest.mark.parametrize("mode", MODES)
def test_all_zero_mask_is_finite(mode):
    losses = LOSSES.clone().requires_grad_()
    loss = total(losses, torch.zeros(3, 3).bool(), mode)
    loss.backward()
    assert float(loss.detach()) == 0 and not losses.grad.any()


@pytest.mark.parametrize("mode", MODES)
@settings(deadline=None)
@given(filler=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_losses_under_mask_zero_have_no_influence(mode, filler):
    assert float(total(torch.where(MASK, LOSSES, filler), MASK, mode)) == float(total(LOSSES, MASK, mode))


@pytest.mark.parametrize("mode", MODES)
@settings(deadline=None)
@given(seed=st.integers(0, 1000), cut=st.integers(0, 6))
def test_parts_of_a_mini_batch_add_up_to_it(mode, seed, cut):
    generator = torch.Generator().manual_seed(seed)
    losses = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 5, generator=generator) > 0.5
    divisor = denominator(mask, mode, 10)
    parts = [aggregate(losses[part], mask[part], mode, divisor) for part in (slice(cut), slice(cut, None))]
    torch.testing.assert_close(sum(parts), aggregate(losses, mask, mode, divisor))


def test_unknown_mode():
    with pytest.raises(ValueError, match="token-meen.*token-mean"):
        aggregate(LOSSES, MASK, "token-meen", 1.0)
