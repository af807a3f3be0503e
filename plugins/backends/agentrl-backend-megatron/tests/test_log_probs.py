"""Log-probs and entropies over shards of the vocabulary, here of one rank; test_parallel has several."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from agentrl_backend_megatron import log_probs
from agentrl_backend_megatron.log_probs import token_log_probs


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("most", [2**27, 40], ids=["whole", "chunks"])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_values_and_gradients(tokens: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_probs, "MOST_LOGITS", most)
    torch.manual_seed(0)
    states, head = torch.randn(tokens, 5, requires_grad=True), torch.randn(13, 5, requires_grad=True)
    labels = torch.randint(0, 13, (tokens,))
    found, entropies = token_log_probs(states, head, labels, 0, None, 0.7, "gradient")
    assert entropies is not None
    logs = (states @ head.T / 0.7).log_softmax(-1)
    wanted, wanted_entropies = logs.gather(-1, labels[:, None]).squeeze(-1), -(logs.exp() * logs).sum(-1)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(entropies, wanted_entropies)
    weights = torch.randn(2, tokens)
    own = torch.autograd.grad((weights[0] * found + weights[1] * entropies).sum(), (states, head))
    expected = torch.autograd.grad((weights[0] * wanted + weights[1] * wanted_entropies).sum(), (states, head))
    torch.testing.assert_close(own, expected)


def test_certain_tokens_have_finite_gradients() -> None:
    states = torch.tensor([[1000.0, 0.0]], requires_grad=True)
    found, entropies = token_log_probs(states, torch.eye(2), torch.tensor([0]), 0, None, 1.0, "gradient")
    assert entropies is not None
    (found + entropies).sum().backward()
    assert float(found) == 0.0 and float(entropies) == 0.0 and bool(states.grad.isfinite().all())  # type: ignore[union-attr]


def test_entropies_without_a_gradient() -> None:
    states = torch.randn(3, 2, requires_grad=True)
    arguments = states, torch.randn(4, 2), torch.zeros(3, dtype=torch.long), 0, None, 1.0
    assert token_log_probs(*arguments, "none")[1] is None
    entropies = token_log_probs(*arguments, "value")[1]
    assert entropies is not None and not entropies.requires_grad
