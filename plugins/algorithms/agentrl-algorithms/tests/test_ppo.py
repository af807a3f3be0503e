import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_algorithms.config import PPOConfig
from agentrl_algorithms.ppo import PPO
from agentrl_core.api import AlgorithmContext, PolicyLossInput, PolicyLossOutput


def loss_of(ratios, advantages, mask=None, **config) -> PolicyLossOutput:
    log_probs = torch.tensor([[math.log(ratio) for ratio in ratios]])
    mask = torch.ones_like(log_probs) if mask is None else torch.tensor([mask])
    batch = PolicyLossInput(log_probs, torch.zeros_like(log_probs), torch.tensor([advantages]), mask.bool())
    return PPO(PPOConfig(**config), AlgorithmContext(4))(batch)


def test_known_values_of_the_clipped_loss():
    result = loss_of([1.5, 0.5, 1.5, 0.5, 1.1], [1.0, 1.0, -1.0, -1.0, 2.0])
    torch.testing.assert_close(result.losses, torch.tensor([[-1.2, -0.5, 1.5, 0.8, -2.2]]))
    assert result.metrics["clip_fraction"].tolist() == [[1, 0, 0, 1, 0]]
    torch.testing.assert_close(result.metrics["ratio"], torch.tensor([[1.5, 0.5, 1.5, 0.5, 1.1]]))
    torch.testing.assert_close(result.metrics["ppo_kl"], -torch.tensor([[1.5, 0.5, 1.5, 0.5, 1.1]]).log())
    assert "clip_fraction_low" not in result.metrics


def test_clip_higher_leaves_room_upwards_only():
    result = loss_of([1.25, 0.75], [1.0, -1.0], clip_low=0.2, clip_high=0.28)
    torch.testing.assert_close(result.losses, torch.tensor([[-1.25, 0.8]]))
    assert result.metrics["clip_fraction"].tolist() == [[0, 1]]


def test_dual_clip_bounds_the_loss_where_the_advantage_is_negative():
    result = loss_of([10.0, 10.0, 2.0], [-1.0, 1.0, -1.0], dual_clip=3.0)
    torch.testing.assert_close(result.losses, torch.tensor([[3.0, -1.2, 2.0]]))
    assert result.metrics["clip_fraction_low"].tolist() == [[1, 0, 0]]


@pytest.mark.parametrize("dual_clip", [None, 3.0])
@settings(deadline=None)
@given(filler=st.sampled_from([0.0, -1e4, 1e30, math.nan, math.inf, -math.inf]))
def test_filler_logprobs_under_mask_zero_do_not_skew_the_ratio(dual_clip, filler):
    mask = torch.tensor([[1, 0, 1, 0], [0, 1, 1, 1]]).bool()
    old = torch.tensor([[-1.0, -2, -3, -4], [-1.5, -2.5, -0.5, -1]])
    advantages = torch.tensor([[1.0, 1, 1, 1], [-1, -1, -1, -1]])

    def run(fill: float) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
        log_probs = (old + 0.3).requires_grad_()
        batch = PolicyLossInput(log_probs, torch.where(mask, old, fill), torch.where(mask, advantages, fill), mask)
        output = PPO(PPOConfig(dual_clip=dual_clip), AlgorithmContext(4))(batch)
        loss = torch.where(mask, output.losses, 0.0).sum() / mask.sum()
        loss.backward()
        means = {name: float(values[mask].mean()) for name, values in output.metrics.items()}
        return loss.detach(), log_probs.grad, means

    clean, dirty = run(0.0), run(filler)
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1]) and not clean[1][~mask].any()
    assert clean[2] == dirty[2]


def test_gradient_is_the_policy_gradient_where_old_and_new_agree():
    log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    advantages = torch.tensor([[2.0, -3.0]])
    batch = PolicyLossInput(log_probs, log_probs.detach(), advantages, torch.ones(1, 2).bool())
    PPO(PPOConfig(), AlgorithmContext(4))(batch).losses.sum().backward()
    assert torch.equal(log_probs.grad, -advantages)


@settings(deadline=None)
@given(st.floats(-200, 200), st.floats(-5, 5))
def test_losses_and_gradients_are_finite_whatever_the_ratio(log_ratio, advantage):
    log_probs = torch.tensor([[log_ratio]], requires_grad=True)
    batch = PolicyLossInput(log_probs, torch.zeros(1, 1), torch.tensor([[advantage]]), torch.ones(1, 1).bool())
    output = PPO(PPOConfig(), AlgorithmContext(4))(batch)
    output.losses.sum().backward()
    assert torch.isfinite(output.losses).all() and torch.isfinite(log_probs.grad).all()
