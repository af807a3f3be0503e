"""Per-token estimates of KL(policy || reference) from tokens that the policy sampled.

John Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html. With d = log pi(a) - log pi_ref(a):

    k1 = d                 unbiased value; high variance, negative for about half of the tokens
    k2 = d^2 / 2           biased value (small where the policies are close); low variance, never negative
    k3 = exp(-d) - 1 + d   unbiased value; low variance, never negative; at most 10 (large where pi << pi_ref)
    abs = |d|              no KL divergence, but never negative and not dominated by few tokens

As a term of the loss, where only log pi carries a gradient and the tokens were sampled by pi, the expected gradients
differ from the values:

    k1   0: E[grad log pi] vanishes, so it regularises nothing and adds noise
    k2   grad KL(pi || pi_ref), the one that is meant
    k3   grad KL(pi_ref || pi), the reverse direction; close to k2 where the policies are close (used by GRPO)
    abs  grad sum |pi - pi_ref|, twice the total variation

``k1+``, ``k3+`` and ``abs+`` are straight-through forms: they have the value of k1, k3 or abs, and the gradient of k2.

After the first optimizer step of a batch the tokens are no longer the policy's own; no importance weight is applied.
"""

from typing import get_args

from torch import Tensor

from agentrl_core.config.schema import KLEstimator

MAX_LOG_RATIO = 20.0
"""k3's exponent is cut here, because exp(89) overflows float32."""
MAX_K3 = 10.0
"""The estimates of k3 are cut here, as other trainers do: one token would be the whole loss else."""


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, estimator: KLEstimator) -> Tensor:
    """The estimate per token, in the shape of ``log_probs``; differentiable in ``log_probs``.

    Args:
        log_probs: of the sampled tokens under the policy, any shape, float32.
        ref_log_probs: the same under the reference.
        estimator: see the module's docstring.

    Raises ValueError for another estimator.
    """
    difference = log_probs - ref_log_probs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "abs":
        return difference.abs()
    if estimator in ("k1+", "k3+", "abs+"):
        plain: KLEstimator = "k1" if estimator == "k1+" else "k3" if estimator == "k3+" else "abs"
        value = kl_estimate(log_probs, ref_log_probs, plain).detach()
        k2 = difference.square() / 2
        return value + (k2 - k2.detach())
    if estimator == "k3":
        return ((-difference).clamp(max=MAX_LOG_RATIO).exp() - 1 + difference).clamp(max=MAX_K3)
    raise ValueError(f"kl estimator is {estimator!r}, it must be one of {', '.join(get_args(KLEstimator))}")
