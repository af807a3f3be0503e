import math

import torch

from agentrl_core.algorithms.entropy import entropy


def test_equals_that_of_torch_distributions_with_its_gradient():
    logits = torch.randn(3, 4, 11, requires_grad=True)
    ours = entropy(logits, logits.logsumexp(-1))
    theirs = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(ours, theirs)
    weights = torch.randn(3, 4)
    torch.testing.assert_close(
        torch.autograd.grad((ours * weights).sum(), logits), torch.autograd.grad((theirs * weights).sum(), logits)
    )


def test_a_token_that_the_model_rules_out_does_not_make_it_nan():
    logits = torch.tensor([0.0, 0.0, -math.inf], requires_grad=True)
    result = entropy(logits, logits.logsumexp(-1))
    result.backward()
    torch.testing.assert_close(result.detach(), torch.tensor(math.log(2)))
    assert torch.isfinite(logits.grad).all()
