"""The critic's loss.

Shapes: b rows of a micro-batch, R response tokens.
"""

import torch
from torch import Tensor

from agentrl_core.protocol.ragged import under


def value_losses(values_bR: Tensor, old_values_bR: Tensor, returns_bR: Tensor, clip: float | None) -> Tensor:
    """Per-token loss [b, R] of a value function.

        loss = 1/2 (V - return)^2                                          PPO, arXiv 1707.06347, equation 9
        loss = 1/2 max((V - return)^2, (clip(V, V_old ± clip) - return)^2)  with ``clip``

    The clipped form is not in the paper but in its authors' code ("Implementation Matters in Deep RL", arXiv
    2005.12729, section 3): a value may move by at most ``clip`` per batch.
    """
    plain_bR = (values_bR - returns_bR).square()
    if clip is None:
        return plain_bR / 2
    clipped_bR = (values_bR.clamp(old_values_bR - clip, old_values_bR + clip) - returns_bR).square()
    return torch.maximum(plain_bR, clipped_bR) / 2


def explained_variance(values_BR: Tensor, returns_BR: Tensor, mask_BR: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over mask 1: 1 is perfect, 0 no better than a constant.

    0 where the returns do not vary.
    """
    values_N, returns_N = under(mask_BR, values_BR, returns_BR, dtype=torch.float64)
    if len(returns_N) < 2 or bool((returns_N == returns_N[0]).all()):
        return 0.0
    return float(1 - (returns_N - values_N).var() / returns_N.var())
