"""Log-probabilities and entropies from hidden states, where each rank has a part of the vocabulary.

No rank ever has a row of the whole vocabulary, and none has more logits at a time than :data:`MOST_LOGITS`.

Shapes: n tokens, c of a chunk of these; H hidden size; v the tokens of the vocabulary that this rank has.
"""

from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

MOST_LOGITS = 2**27
"""Of a chunk: half a GiB in float32, and as much for their gradient."""


def token_log_probs(
    states_nH: Tensor,
    head_vH: Tensor,
    labels_n: Tensor,
    first: int,
    group: Any,
    temperature: float,
    entropies: Literal["none", "value", "gradient"],
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities [n] of the labels under softmax(logits / temperature), and entropies [n] in nats; float32.

    The gradient of the hidden states is this rank's part: the caller adds up those of the group.

    Args:
        head_vH: the rows of the output head that this rank has, without padding.
        first: number of the first of these in the vocabulary.
        group: of the ranks that share the vocabulary.
        entropies: ``gradient``: with one; ``value``: without; ``none``: None.
    """
    size = max(MOST_LOGITS // len(head_vH), 1)
    chunks = list(zip(states_nH.split(size), labels_n.split(size), strict=True)) or [(states_nH, labels_n)]

    def of_chunk(states_cH: Tensor, labels_c: Tensor) -> tuple[Tensor, Tensor]:
        logits_cv = F.linear(states_cH, head_vH).float() / temperature
        found: tuple[Tensor, Tensor] = _OverShards.apply(logits_cv, labels_c - first, group, entropies)  # type: ignore[no-untyped-call]
        return found

    if len(chunks) == 1 or not torch.is_grad_enabled():
        results = [of_chunk(*chunk) for chunk in chunks]
    else:
        results = [checkpoint(of_chunk, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    log_probs_n, entropies_n = (torch.cat(parts) for parts in zip(*results, strict=True))
    if entropies == "none":
        return log_probs_n, None
    return log_probs_n, entropies_n if entropies == "gradient" else entropies_n.detach()


class _OverShards(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_cv: Tensor, labels_c: Tensor, group: Any, entropies: str
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        largest_c = logits_cv.amax(-1)
        dist.all_reduce(largest_c, dist.ReduceOp.MAX, group)
        shifted_cv = logits_cv - largest_c.unsqueeze(-1)
        is_here_c = (labels_c >= 0) & (labels_c < logits_cv.shape[-1])
        own_c = labels_c.clamp(0, logits_cv.shape[-1] - 1)
        chosen_c = shifted_cv.gather(-1, own_c.unsqueeze(-1)).squeeze(-1) * is_here_c
        weights_cv = shifted_cv.exp()
        sums_3c = torch.stack([weights_cv.sum(-1), (weights_cv * shifted_cv).sum(-1), chosen_c])
        dist.all_reduce(sums_3c, group=group)
        total_c, weighted_c, chosen_c = sums_3c
        log_total_c = total_c.log()
        entropies_c = log_total_c - weighted_c / total_c
        shares_cv = weights_cv.div_(total_c.unsqueeze(-1))
        ctx.save_for_backward(shares_cv, own_c, is_here_c, entropies_c)
        ctx.entropies = entropies
        return chosen_c - log_total_c, entropies_c

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        """d log p(y) / d logit = [y] - p; d entropy / d logit = -p (log p + entropy)."""
        of_log_probs_c, of_entropies_c = gradients
        shares_cv, own_c, is_here_c, entropies_c = ctx.saved_tensors
        gradient_cv = shares_cv * -of_log_probs_c.unsqueeze(-1)
        gradient_cv.scatter_add_(-1, own_c.unsqueeze(-1), (of_log_probs_c * is_here_c).unsqueeze(-1))
        if ctx.entropies == "gradient":
            # p log p is 0 where p is.
            logs_cv = torch.special.xlogy(shares_cv, shares_cv)
            part_cv = logs_cv + shares_cv * entropies_c.unsqueeze(-1)
            gradient_cv -= part_cv * of_entropies_c.unsqueeze(-1)
        return gradient_cv, None, None, None
