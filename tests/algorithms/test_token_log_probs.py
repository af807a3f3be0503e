import math

import pytest
import torch

from agentrl_core.algorithms import token_log_probs as module
from agentrl_core.algorithms.token_log_probs import token_log_probs


@pytest.fixture(params=[2**17, 25], ids=["one block", "blocks"])
def blocks(request, monkeypatch):
    monkeypatch.setattr(module, "CPU_BLOCK", request.param)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropies", ["none", "value", "gradient"])
def test_equal_those_of_torch_distributions_with_their_gradients(blocks, temperature, entropies):
    logits = torch.randn(13, 11, requires_grad=True)
    labels, weights = torch.randint(11, (13,)), torch.randn(2, 13)
    ours = token_log_probs(logits, labels, temperature, entropies)
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    theirs = (distribution.log_prob(labels), distribution.entropy())[: len(ours)]
    torch.testing.assert_close(ours, theirs)
    assert [result.requires_grad for result in ours] == {
        "none": [True], "value": [True, False], "gradient": [True, True]
    }[entropies]  # fmt: skip

    def gradient(results):
        return torch.autograd.grad(sum((r * w).sum() for r, w in zip(results, weights, strict=False)), logits)[0]

    torch.testing.assert_close(gradient(ours), gradient(theirs[:1] if entropies == "value" else theirs))


def test_only_one_of_the_results_may_matter(blocks):
    logits, labels = torch.randn(5, 11, requires_grad=True), torch.arange(5)
    distribution = torch.distributions.Categorical(logits=logits)
    ours = token_log_probs(logits, labels, entropies="gradient")
    for mine, theirs in zip(ours, (distribution.log_prob(labels), distribution.entropy()), strict=True):
        (gradient,) = torch.autograd.grad(mine.sum(), logits, retain_graph=True)
        torch.testing.assert_close(gradient, torch.autograd.grad(theirs.sum(), logits, retain_graph=True)[0])


def test_the_gradient_is_that_of_finite_differences(blocks):
    logits = torch.randn(4, 7, requires_grad=True) * 3
    direction, weights = torch.randn(4, 7), torch.randn(2, 4)
    labels = torch.tensor([0, 6, 3, 3])

    def value(shift: float) -> torch.Tensor:
        results = token_log_probs(logits + shift * direction, labels, 0.5, "gradient")
        return sum((result * weight).sum() for result, weight in zip(results, weights, strict=True))

    (gradient,) = torch.autograd.grad(value(0.0), logits)
    with torch.no_grad():
        slope = (value(1e-2) - value(-1e-2)) / 2e-2
    torch.testing.assert_close((gradient * direction).sum(), slope, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("entropies", ["none", "value", "gradient"])
def test_a_token_that_the_model_rules_out_makes_nothing_nan(entropies):
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    results = token_log_probs(logits, torch.tensor([1]), 1.0, entropies)
    sum(result.sum() for result in results if result.requires_grad).backward()
    for result in results:
        torch.testing.assert_close(result.detach().abs(), torch.tensor([math.log(2)]))
    assert torch.isfinite(logits.grad).all()


def test_half_precision_is_worked_out_in_float32():
    logits = (torch.randn(6, 50) * 4).bfloat16().requires_grad_()
    labels = torch.arange(6)
    log_probs, entropies = token_log_probs(logits, labels, 1.0, "value")
    expected = torch.distributions.Categorical(logits=logits.detach().float())
    torch.testing.assert_close(log_probs.detach(), expected.log_prob(labels))
    torch.testing.assert_close(entropies, expected.entropy())
    log_probs.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True)
    log_probs, entropies = token_log_probs(logits, torch.tensor([0]), 1.0, "value")
    assert (log_probs.item(), entropies.item()) == (0.0, 0.0)


def test_no_tokens():
    assert [len(result) for result in token_log_probs(torch.zeros(0, 5), torch.zeros(0).long(), 1.0, "value")] == [0, 0]


@pytest.mark.parametrize("weight", [1.5, -200.0])
def test_a_token_that_is_ruled_out_gives_no_nan_however_large_the_entropy_term(weight):
    logits = torch.tensor([[0.3, 0.0, -math.inf, -300.0]], requires_grad=True)
    _, entropy = token_log_probs(logits, torch.tensor([0]), entropies="gradient")
    (gradient,) = torch.autograd.grad(weight * entropy.sum(), logits)
    plain = torch.tensor([[0.3, 0.0]], requires_grad=True)
    (expected,) = torch.autograd.grad(weight * torch.distributions.Categorical(logits=plain).entropy().sum(), plain)
    torch.testing.assert_close(gradient, torch.cat([expected, torch.zeros(1, 2)], 1))
