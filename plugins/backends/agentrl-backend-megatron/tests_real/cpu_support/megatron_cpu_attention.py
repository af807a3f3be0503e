"""Context parallelism for Megatron-Core's attention in plain torch, which has none: it is Transformer Engine's.

Every rank gathers the keys and values of all, and masks those behind each of its queries.

Shapes: c tokens of this rank's part of a row, s of all parts; b rows, g key-value heads, d head size.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor

OWN_INIT, OWN_FORWARD = DotProductAttention.__init__, DotProductAttention.forward


def _init(self: Any, config: Any, *arguments: Any, **named: Any) -> None:
    plain = copy.copy(config)
    plain.context_parallel_size = 1
    OWN_INIT(self, plain, *arguments, **named)


def _forward(
    self: Any, query: Tensor, key_cbgd: Tensor, value_cbgd: Tensor, attention_mask: Any, *arguments: Any, **named: Any
) -> Any:
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    if size > 1:
        both = _FromAll.apply(torch.stack([key_cbgd, value_cbgd], 1), parallel_state.get_context_parallel_group())
        key_cbgd, value_cbgd = (each.contiguous() for each in both.unbind(1))
        half = len(query) // 2
        places = [
            torch.cat([torch.arange(half) + half * chunk for chunk in (each, 2 * size - 1 - each)])
            for each in range(size)
        ]
        attention_mask = (torch.cat(places) > places[rank].unsqueeze(-1))[None, None]
    return OWN_FORWARD(self, query, key_cbgd, value_cbgd, attention_mask, *arguments, **named)


class _FromAll(torch.autograd.Function):
    """[c, ...] of each rank as [s, ...], one after the other."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own, group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        whole = gradients[0].contiguous()
        dist.all_reduce(whole, group=ctx.group)
        return whole.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


DotProductAttention.__init__, DotProductAttention.forward = _init, _forward
