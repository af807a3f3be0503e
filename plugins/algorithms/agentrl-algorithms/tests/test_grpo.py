import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_algorithms.config import GRPOConfig
from agentrl_algorithms.grpo import GRPO
from agentrl_core.api import AdvantageInput, AdvantageOutput, AlgorithmContext


def estimate(scores, groups, trajectories=None, masks=None, **config) -> AdvantageOutput:
    """GRPO of one row per score; the reward stands on the row's last sampled token."""
    masks = masks or [[1, 1]] * len(scores)
    mask = torch.tensor(masks, dtype=torch.bool)
    rewards = torch.zeros(mask.shape)
    for row, score in enumerate(scores):
        sampled = mask[row].nonzero()
        if len(sampled):
            rewards[row, sampled[-1, 0]] = score
    trajectories = trajectories or [f"t{row}" for row in range(len(scores))]
    batch = AdvantageInput(rewards, mask, np.array(groups, object), np.array(trajectories, object))
    return GRPO(GRPOConfig(**config), AlgorithmContext(group_size=4))(batch)


def test_advantages_are_the_scores_standardised_within_their_group():
    result = estimate([1, 0, 0, 5, 3], ["a", "a", "a", "b", "b"])
    std = math.sqrt(1 / 3)
    expected = [(1 - 1 / 3) / std, (-1 / 3) / std, (-1 / 3) / std, 1 / math.sqrt(2), -1 / math.sqrt(2)]
    torch.testing.assert_close(result.advantages[:, 0], torch.tensor(expected), atol=1e-5, rtol=0)
    assert torch.equal(result.advantages[:, 0], result.advantages[:, 1])
    assert result.returns[:, 0].tolist() == [1, 0, 0, 5, 3]


def test_dr_grpo_only_subtracts_the_mean():
    result = estimate([1, 0, 0, 0], ["a"] * 4, norm_by_std=False)
    assert result.advantages[:, 0].tolist() == [0.75, -0.25, -0.25, -0.25]


def test_rows_of_one_trajectory_have_one_vote_in_grpo():
    forked = estimate([1, 1, 1, 0], ["a"] * 4, ["x", "x", "x", "y"], norm_by_std=False)
    assert forked.advantages[:, 0].tolist() == [0.5, 0.5, 0.5, -0.5]


def test_excluded_samples_are_not_in_group_statistics():
    with_excluded = estimate([1, 0, 100], ["a"] * 3, masks=[[1, 1], [1, 1], [0, 0]], norm_by_std=False)
    assert with_excluded.advantages[:2, 0].tolist() == [0.5, -0.5]
    assert with_excluded.advantages[2].tolist() == [0, 0]


def test_a_group_of_one_usable_trajectory_has_no_advantage():
    result = estimate([1, 1, 7], ["a", "a", "b"], masks=[[1, 1], [0, 0], [1, 1]])
    assert not result.advantages.any()


def test_equal_scores_give_exactly_zero_not_a_rounding_error_divided_by_eps():
    assert not estimate([0.1] * 7, ["a"] * 7).advantages.any()


def test_all_zero_mask_is_finite():
    result = estimate([1, 2], ["a", "a"], masks=[[0, 0], [0, 0]])
    assert not result.advantages.any() and not result.returns.any()


@settings(deadline=None)
@given(
    scores=st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=6),
    filler=st.sampled_from([100.0, -1e30, math.nan, math.inf]),
)
def test_rewards_under_mask_zero_have_no_influence(scores, filler):
    mask = torch.tensor([[1, 0, 1, 0]] * len(scores), dtype=torch.bool)
    rewards = torch.zeros(mask.shape)
    rewards[:, 2] = torch.tensor(scores)
    ids = np.array(range(len(scores)), object), np.array(["g"] * len(scores), object)

    def run(token_rewards: torch.Tensor) -> AdvantageOutput:
        return GRPO(GRPOConfig(), AlgorithmContext(4))(AdvantageInput(token_rewards, mask, ids[1], ids[0]))

    clean, dirty = run(rewards), run(torch.where(mask, rewards, filler))
    assert torch.equal(clean.advantages, dirty.advantages) and torch.equal(clean.returns, dirty.returns)
    assert not clean.advantages[~mask].any() and torch.isfinite(clean.advantages).all()


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=8))
def test_advantages_of_a_group_add_up_to_zero(scores):
    advantages = estimate(scores, ["g"] * len(scores)).advantages[:, 0]
    assert float(advantages.sum()) == pytest.approx(0, abs=1e-4)
