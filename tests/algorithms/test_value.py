import pytest
import torch

from agentrl_core.algorithms.value import explained_variance, value_losses


def test_squared_error_without_clip():
    losses = value_losses(torch.tensor([[1.0, 3.0]]), torch.zeros(1, 2), torch.tensor([[0.0, 1.0]]), None)
    assert losses.tolist() == [[0.5, 2.0]]


def test_clip_takes_the_larger_error_and_stops_the_gradient_of_a_value_that_moved_far():
    values = torch.tensor([[1.0, 0.1, -1.0]], requires_grad=True)
    losses = value_losses(values, torch.zeros(1, 3), torch.tensor([[1.0, 1.0, 1.0]]), 0.2)
    torch.testing.assert_close(losses.detach(), torch.tensor([[0.8**2 / 2, 0.9**2 / 2, 2.0]]))
    losses.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([[0.0, -0.9, -2.0]]))


def test_explained_variance_is_over_sampled_tokens():
    returns, mask = torch.tensor([[1.0, 2.0, 3.0, 50.0]]), torch.tensor([[1, 1, 1, 0]]).bool()
    assert explained_variance(returns + 7.0, returns, mask) == pytest.approx(1.0)
    assert explained_variance(torch.zeros(1, 4), returns, mask) == pytest.approx(0.0)
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3.0)


@pytest.mark.parametrize("mask", [[[0, 0]], [[1, 0]], [[1, 1]]])
def test_all_zero_mask_is_finite(mask):
    assert explained_variance(torch.tensor([[1.0, 2.0]]), torch.ones(1, 2), torch.tensor(mask).bool()) == 0.0
