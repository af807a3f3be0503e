"""Log-probabilities of chosen tokens, and entropies, of next-token distributions.

Worked out block by block: a block's intermediate results stay in the CPU's cache, and on a GPU only the blocks are in
float32, never all logits.

Shapes: n tokens, c of a block, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

Entropies = Literal["none", "value", "gradient"]

CPU_BLOCK = 2**17
"""Logits of a block, for each thread: half a MiB in float32."""
GPU_BLOCK = 2**26
LOWEST = -1e4
"""Takes the place of lower log-probabilities, -inf for one: their exp is 0 in float32 anyway, and 0 * -inf is NaN."""


def token_log_probs(
    logits_nV: Tensor, labels_n: Tensor, temperature: float = 1.0, entropies: Entropies = "none"
) -> tuple[Tensor, ...]:
    """Log-probability [n] of each label under softmax(logits / temperature), and unless ``none`` the entropy [n].

    In float32 and nats, whatever the dtype of the logits is. Log-probabilities carry a gradient wherever gradients are
    enabled, entropies as ``entropies`` says.

        H = log Z - sum_v softmax(z)_v z_v        dH/dz_v = -p_v (log p_v + H)

    Args:
        logits_nV: [n, V], finite or -inf.
        labels_n: [n] int64.
    """
    results: tuple[Tensor, Tensor] = _TokenLogProbs.apply(  # type: ignore[no-untyped-call]
        logits_nV, labels_n, temperature, entropies
    )
    return results[:1] if entropies == "none" else results


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_nV: Tensor, labels_n: Tensor, temperature: float, entropies: Entropies
    ) -> tuple[Tensor, Tensor]:
        log_probs_n = torch.empty(len(labels_n), dtype=torch.float32, device=logits_nV.device)
        normalisers_n, entropies_n = torch.empty_like(log_probs_n), torch.zeros_like(log_probs_n)
        for block in blocks(logits_nV):
            scaled_cV = logits_nV[block].float() / temperature
            largest_c1 = scaled_cV.amax(-1, keepdim=True)
            scaled_cV -= largest_c1
            chosen_c = scaled_cV.gather(-1, labels_n[block].unsqueeze(-1)).squeeze(-1)
            if entropies == "none":
                sums_c = scaled_cV.exp_().sum(-1)
            else:
                weights_cV = scaled_cV.exp()
                sums_c = weights_cV.sum(-1)
                means_c = weights_cV.mul_(scaled_cV.clamp_(min=LOWEST)).sum(-1) / sums_c
                entropies_n[block] = sums_c.log() - means_c
            log_probs_n[block] = chosen_c - sums_c.log()
            normalisers_n[block] = largest_c1.squeeze(-1) + sums_c.log()
        ctx.save_for_backward(logits_nV, labels_n, normalisers_n, entropies_n)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        if entropies != "gradient":
            ctx.mark_non_differentiable(entropies_n)
        return log_probs_n, entropies_n

    @staticmethod
    def backward(
        ctx: Any, of_log_probs_n: Tensor | None, of_entropies_n: Tensor | None
    ) -> tuple[Tensor | None, None, None, None]:
        logits_nV, labels_n, normalisers_n, entropies_n = ctx.saved_tensors
        if of_log_probs_n is None:
            of_log_probs_n = torch.zeros_like(normalisers_n)
        gradient_nV = torch.empty_like(logits_nV)
        for block in blocks(logits_nV):
            log_probs_cV = logits_nV[block].float() / ctx.temperature
            log_probs_cV -= normalisers_n[block].unsqueeze(-1)
            result_cV = log_probs_cV.exp()
            if of_entropies_n is None:
                result_cV *= -of_log_probs_n[block].unsqueeze(-1)
            else:
                log_probs_cV.clamp_(min=LOWEST).add_(entropies_n[block].unsqueeze(-1))
                log_probs_cV.mul_(of_entropies_n[block].unsqueeze(-1)).add_(of_log_probs_n[block].unsqueeze(-1))
                result_cV.mul_(log_probs_cV).neg_()
            result_cV.scatter_add_(-1, labels_n[block].unsqueeze(-1), of_log_probs_n[block].unsqueeze(-1))
            gradient_nV[block] = result_cV.div_(ctx.temperature)
        return gradient_nV, None, None, None


def blocks(logits_nV: Tensor) -> Iterator[slice]:
    """Tokens whose logits are worked out together."""
    elements = CPU_BLOCK * torch.get_num_threads() if logits_nV.device.type == "cpu" else GPU_BLOCK
    rows = max(elements // logits_nV.shape[-1], 1)
    for start in range(0, len(logits_nV), rows):
        yield slice(start, start + rows)
