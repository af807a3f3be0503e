import pytest
import torch

from agentrl_core.algorithms.kl import kl_estimate

POLICY = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
REFERENCE = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)


def true_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p * (p / q).log()).sum()


def expected(estimator: str) -> float:
    """The estimator's exact mean over tokens that the policy samples."""
    return float((POLICY * kl_estimate(POLICY.log(), REFERENCE.log(), estimator)).sum())


@pytest.mark.parametrize("estimator", ["k1", "k3", "k1+", "k3+"])
def test_k1_and_k3_are_unbiased(estimator):
    assert expected(estimator) == pytest.approx(float(true_kl(POLICY, REFERENCE)), abs=1e-12)


def test_k2_is_biased_but_close_for_close_policies():
    near = (POLICY + 0.02 * REFERENCE) / 1.02
    mean = float((POLICY * kl_estimate(POLICY.log(), near.log(), "k2")).sum())
    assert mean == pytest.approx(float(true_kl(POLICY, near)), rel=0.05)
    assert abs(expected("k2") - float(true_kl(POLICY, REFERENCE))) > 1e-3


def test_numeric_values():
    policy, reference = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    torch.testing.assert_close(kl_estimate(policy, reference, "k1"), torch.tensor([0.5, -1.0]))
    torch.testing.assert_close(kl_estimate(policy, reference, "k2"), torch.tensor([0.125, 0.5]))
    torch.testing.assert_close(kl_estimate(policy, reference, "k3"), torch.tensor([0.1065307, 0.7182818]))
    torch.testing.assert_close(kl_estimate(policy, reference, "abs"), torch.tensor([0.5, 1.0]))
    torch.testing.assert_close(kl_estimate(policy, reference, "k1+"), torch.tensor([0.5, -1.0]))
    torch.testing.assert_close(kl_estimate(policy, reference, "k3+"), torch.tensor([0.1065307, 0.7182818]))
    torch.testing.assert_close(kl_estimate(policy, reference, "abs+"), torch.tensor([0.5, 1.0]))


@pytest.mark.parametrize("estimator", ["k2", "k3", "abs", "k3+", "abs+"])
def test_never_negative(estimator):
    difference = torch.linspace(-200, 200, 401)
    values = kl_estimate(difference, torch.zeros(401), estimator)
    assert (values >= 0).all() and torch.isfinite(values).all()


@pytest.mark.parametrize(
    ("estimator", "meaning"),
    [
        ("k1", lambda logits: torch.zeros((), dtype=torch.float64) * logits.sum()),
        ("k2", lambda logits: true_kl(logits.softmax(-1), REFERENCE)),
        ("k3", lambda logits: true_kl(REFERENCE, logits.softmax(-1))),
        ("abs", lambda logits: (logits.softmax(-1) - REFERENCE).abs().sum()),
        ("k1+", lambda logits: true_kl(logits.softmax(-1), REFERENCE)),
        ("k3+", lambda logits: true_kl(logits.softmax(-1), REFERENCE)),
        ("abs+", lambda logits: true_kl(logits.softmax(-1), REFERENCE)),
    ],
)
def test_expected_gradient_is_the_one_that_the_docstring_claims(estimator, meaning):
    logits = POLICY.log().requires_grad_()
    # Tokens are sampled by the policy, so their weights carry no gradient.
    loss = (POLICY * kl_estimate(logits.log_softmax(-1), REFERENCE.log(), estimator)).sum()
    (estimated,) = torch.autograd.grad(loss, logits)
    (claimed,) = torch.autograd.grad(meaning(logits), logits)
    torch.testing.assert_close(estimated, claimed)


def test_one_unlikely_token_is_not_the_whole_loss():
    log_probs = torch.tensor([-30.0, -1.0], requires_grad=True)
    values = kl_estimate(log_probs, torch.tensor([-0.5, -1.0]), "k3")
    assert values.tolist() == [10.0, 0.0]
    (gradient,) = torch.autograd.grad(values.sum(), log_probs)
    assert gradient.tolist() == [0.0, 0.0]


def test_unknown_estimator():
    with pytest.raises(ValueError, match="k4.*k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
