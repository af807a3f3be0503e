"""Entropy of next-token distributions.

Shapes: ... any, V vocabulary.
"""

import torch
from torch import Tensor


def entropy(logits_V: Tensor, log_normaliser: Tensor) -> Tensor:
    """Entropy [...] in nats of softmax(logits), float32.

        H = log Z - sum_v softmax(z)_v z_v

    Args:
        logits_V: [..., V] float32, finite or -inf.
        log_normaliser: [...] ``logsumexp(logits)``, which callers have already.
    """
    probs_V = (logits_V - log_normaliser.unsqueeze(-1)).exp()
    # A token that the model rules out has probability 0: 0 * -inf would be NaN, also in the gradient.
    return log_normaliser - (probs_V * logits_V.clamp(min=torch.finfo(logits_V.dtype).min)).sum(-1)
