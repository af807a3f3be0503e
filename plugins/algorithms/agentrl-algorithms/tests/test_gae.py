import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_algorithms.config import GAEConfig
from agentrl_algorithms.gae import GAE
from agentrl_core.api import AdvantageInput, AdvantageOutput, AlgorithmContext


def estimate(rewards, values, mask, whiten=False, **config) -> AdvantageOutput:
    ids = np.array(range(len(mask)), object)
    batch = AdvantageInput(
        torch.as_tensor(rewards, dtype=torch.float32),
        torch.as_tensor(mask).bool(),
        ids,
        ids,
        None if values is None else torch.as_tensor(values, dtype=torch.float32),
    )
    return GAE(GAEConfig(whiten=whiten, **config), AlgorithmContext(4))(batch)


def textbook(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Equation 16 as the sum it is: A_t = sum_l (gamma lam)^l delta_{t+l}."""
    following = [*values[1:], 0.0][: len(values)]
    deltas = [r + gamma * n - v for r, v, n in zip(rewards, values, following, strict=True)]
    return [
        sum((gamma * lam) ** (later - t) * deltas[later] for later in range(t, len(deltas))) for t in range(len(deltas))
    ]


def test_known_values_without_gaps():
    result = estimate([[0, 0, 1.0]], [[0.5, 0.2, 0.4]], [[1, 1, 1]], gamma=0.9, lam=0.8)
    torch.testing.assert_close(result.advantages[0], torch.tensor(textbook([0, 0, 1], [0.5, 0.2, 0.4], 0.9, 0.8)))
    torch.testing.assert_close(result.returns, result.advantages + torch.tensor([[0.5, 0.2, 0.4]]))


def test_gamma_and_lambda_one_give_return_minus_value():
    result = estimate([[0, 0, 1.0]], [[0.5, 0.2, 0.4]], [[1, 1, 1]])
    torch.testing.assert_close(result.advantages, torch.tensor([[0.5, 0.8, 0.6]]))
    torch.testing.assert_close(result.returns, torch.ones(1, 3))


def test_masked_value_of_100_changes_nothing_in_gae():
    mask = [[1, 1, 0, 0, 1, 0]]
    clean = estimate([[0, 0, 0, 0, 1.0, 0]], [[0.5, 0.2, 0, 0, 0.4, 0]], mask, gamma=0.9, lam=0.8)
    dirty = estimate([[0, 0, 0, 0, 1.0, 0]], [[0.5, 0.2, 100, 100, 0.4, 100]], mask, gamma=0.9, lam=0.8)
    assert torch.equal(clean.advantages, dirty.advantages) and torch.equal(clean.returns, dirty.returns)


def test_advantage_is_carried_across_observations():
    result = estimate([[0, 0, 0, 0, 1.0, 0]], [[0.5, 0.2, 9, 9, 0.4, 9]], [[1, 1, 0, 0, 1, 0]], gamma=0.9, lam=0.8)
    compact = textbook([0, 0, 1], [0.5, 0.2, 0.4], 0.9, 0.8)
    torch.testing.assert_close(result.advantages[0, [0, 1, 4]], torch.tensor(compact))
    assert not result.advantages[0, [2, 3, 5]].any() and not result.returns[0, [2, 3, 5]].any()


@settings(deadline=None)
@given(data=st.data(), rows=st.integers(1, 4), width=st.integers(1, 8))
def test_gaps_anywhere_do_not_matter(data, rows, width):
    """Each row equals the textbook's sum over its sampled tokens alone, whatever stands under mask 0."""
    number = st.floats(-2, 2, width=32)
    grid = st.lists(st.lists(number, min_size=width, max_size=width), min_size=rows, max_size=rows)
    rewards, values = torch.tensor(data.draw(grid)), torch.tensor(data.draw(grid))
    mask = torch.tensor(
        data.draw(st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=rows, max_size=rows))
    )
    filler = data.draw(st.sampled_from([0.0, 100.0, float("nan"), float("inf")]))
    result = estimate(torch.where(mask, rewards, filler), torch.where(mask, values, filler), mask, gamma=0.95, lam=0.7)
    for row in range(rows):
        expected = textbook(rewards[row][mask[row]].tolist(), values[row][mask[row]].tolist(), 0.95, 0.7)
        torch.testing.assert_close(result.advantages[row][mask[row]], torch.tensor(expected), atol=1e-4, rtol=1e-4)
    assert not result.advantages[~mask].any() and not result.returns[~mask].any()


def test_whitening_is_over_sampled_tokens_and_leaves_returns_alone():
    rewards, values = torch.randn(5, 7), torch.randn(5, 7)
    mask = torch.rand(5, 7) > 0.4
    plain, white = estimate(rewards, values, mask), estimate(rewards, values, mask, whiten=True)
    chosen = white.advantages[mask]
    assert float(chosen.mean()) == pytest.approx(0, abs=1e-5)
    assert float(chosen.var(unbiased=False)) == pytest.approx(1, abs=1e-4)
    assert not white.advantages[~mask].any()
    assert torch.equal(plain.returns, white.returns)


@pytest.mark.parametrize("mask", [[[0, 0]], [[1, 0]], [[1, 1]]])
def test_all_zero_mask_is_finite(mask):
    result = estimate([[0.0, 0.0]], [[0.0, 0.0]], mask, whiten=True)
    assert torch.isfinite(result.advantages).all()


def test_without_values_it_says_what_is_missing():
    with pytest.raises(ValueError, match="needs a critic's values"):
        estimate([[1.0]], None, [[1]])
