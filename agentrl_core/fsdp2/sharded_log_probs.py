"""Log-probabilities and entropies of tokens where each rank has the logits of a part of the vocabulary.

No rank ever has a row of the whole vocabulary: three numbers of each token are added up, or compared, over the ranks.

Shapes: n tokens, c of a block, v logits of this rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from agentrl_core.algorithms.token_log_probs import LOWEST, Entropies, blocks


@dataclass(frozen=True)
class VocabularyPart:
    """The tokens whose logits this rank has.

    Args:
        group: of the ranks that have all of them together.
        start: first of them.
        size: how many.
    """

    group: ProcessGroup
    start: int
    size: int


def sharded_log_probs(
    logits_nv: Tensor, labels_n: Tensor, part: VocabularyPart, temperature: float = 1.0, entropies: Entropies = "none"
) -> tuple[Tensor, ...]:
    """As :func:`agentrl_core.algorithms.token_log_probs.token_log_probs`, of a part of the logits: all ranks of the
    group must call this with the same labels, and get the same results.

    Each rank gets the gradient of its logits, from the loss that all of them compute.
    """
    results: tuple[Tensor, Tensor] = _ShardedLogProbs.apply(  # type: ignore[no-untyped-call]
        logits_nv, labels_n, part, temperature, entropies
    )
    return results[:1] if entropies == "none" else results


class _ShardedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_nv: Tensor, labels_n: Tensor, part: VocabularyPart, temperature: float, entropies: Entropies
    ) -> tuple[Tensor, Tensor]:
        own_n, is_own_n = _own_labels(labels_n, part)
        largest_n = torch.empty(len(labels_n), dtype=torch.float32, device=logits_nv.device)
        for block in blocks(logits_nv):
            largest_n[block] = logits_nv[block].amax(-1).float() / temperature
        dist.all_reduce(largest_n, dist.ReduceOp.MAX, part.group)
        # Of each token: the logit of its label, the sum of exponentials, and that weighted with logits.
        sums_3n = torch.zeros(3, len(labels_n), dtype=torch.float32, device=logits_nv.device)
        for block in blocks(logits_nv):
            scaled_cv = logits_nv[block].float() / temperature - largest_n[block].unsqueeze(-1)
            chosen_c = scaled_cv.gather(-1, own_n[block].unsqueeze(-1)).squeeze(-1)
            sums_3n[0, block] = chosen_c.masked_fill(~is_own_n[block], 0.0)
            if entropies == "none":
                sums_3n[1, block] = scaled_cv.exp_().sum(-1)
            else:
                weights_cv = scaled_cv.exp()
                sums_3n[1, block] = weights_cv.sum(-1)
                sums_3n[2, block] = weights_cv.mul_(scaled_cv.clamp_(min=LOWEST)).sum(-1)
        dist.all_reduce(sums_3n, group=part.group)
        chosen_n, total_n, weighted_n = sums_3n
        log_total_n = total_n.log()
        entropies_n = torch.zeros_like(log_total_n) if entropies == "none" else log_total_n - weighted_n / total_n
        ctx.save_for_backward(logits_nv, own_n, is_own_n, largest_n + log_total_n, entropies_n)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        if entropies != "gradient":
            ctx.mark_non_differentiable(entropies_n)
        return chosen_n - log_total_n, entropies_n

    @staticmethod
    def backward(
        ctx: Any, of_log_probs_n: Tensor | None, of_entropies_n: Tensor | None
    ) -> tuple[Tensor | None, None, None, None, None]:
        logits_nv, own_n, is_own_n, normalisers_n, entropies_n = ctx.saved_tensors
        if of_log_probs_n is None:
            of_log_probs_n = torch.zeros_like(normalisers_n)
        gradient_nv = torch.empty_like(logits_nv)
        for block in blocks(logits_nv):
            log_probs_cv = logits_nv[block].float() / ctx.temperature - normalisers_n[block].unsqueeze(-1)
            result_cv = log_probs_cv.exp()
            if of_entropies_n is None:
                result_cv *= -of_log_probs_n[block].unsqueeze(-1)
            else:
                log_probs_cv.clamp_(min=LOWEST).add_(entropies_n[block].unsqueeze(-1))
                log_probs_cv.mul_(of_entropies_n[block].unsqueeze(-1)).add_(of_log_probs_n[block].unsqueeze(-1))
                result_cv.mul_(log_probs_cv).neg_()
            of_labels_c = of_log_probs_n[block].masked_fill(~is_own_n[block], 0.0)
            result_cv.scatter_add_(-1, own_n[block].unsqueeze(-1), of_labels_c.unsqueeze(-1))
            gradient_nv[block] = result_cv.div_(ctx.temperature)
        return gradient_nv, None, None, None, None


def _own_labels(labels_n: Tensor, part: VocabularyPart) -> tuple[Tensor, Tensor]:
    """The labels among the tokens of this rank, 0 for others, and which are."""
    is_own_n = (labels_n >= part.start) & (labels_n < part.start + part.size)
    return torch.where(is_own_n, labels_n - part.start, 0), is_own_n
