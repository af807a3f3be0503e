"""Rows whose tokens are spread over ranks (Ulysses, arXiv 2309.14509).

Token by token each rank computes its part of the sequence. For attention the ranks exchange heads for tokens: each then
has the whole sequence, for some of the heads, and computes what one rank would. So masks, packed rows and trees are
those of the whole sequence.

Shapes: b rows of the forward pass, T tokens of each, m of them on this rank; R ranks; h heads, D size of a head; n
predicted tokens of each row, s of them on this rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

from agentrl_core.fsdp2.mesh import Peers


@dataclass(frozen=True)
class SequencePart:
    """The tokens of a forward pass that this rank has.

    Args:
        peers: the ranks that have the others.
        rows: b.
        tokens: T.
        mask: [b, 1, T, T] bool, of padded rows: which tokens a token sees; None: it is causal, or rows are packed.
        chosen: [s] which of the predicted tokens of each row are predicted here.
        predicted: n.
    """

    peers: Peers
    rows: int
    tokens: int
    mask: Tensor | None
    chosen: Tensor
    predicted: int

    def heads(self, states: Tensor) -> Tensor:
        """All tokens [b, h/R, T, D] for some heads, of all heads [b, h, m, D] for some tokens."""
        ranks = self.peers.size
        own = torch.stack(states.chunk(ranks, 1))
        return _exchanged(own, self.peers.group).permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : self.tokens]

    def own_tokens(self, states: Tensor) -> Tensor:
        """All heads [b, m, h, D] for some tokens, of some heads [b, T, h/R, D] for all tokens."""
        ranks = self.peers.size
        filled = functional.pad(states, (0, 0, 0, 0, 0, -self.tokens % ranks))
        own = torch.stack(filled.chunk(ranks, 1))
        return _exchanged(own, self.peers.group).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def of_all(self, values: Tensor) -> Tensor:
        """What is computed for all predicted tokens [b * n, …], of what this rank has [b * s, …]. Each rank gets the
        gradient of its part."""
        own = values.view(self.rows, len(self.chosen), *values.shape[1:])
        whole: Tensor = _Gathered.apply(own, self.chosen, self.predicted, self.peers.group)  # type: ignore[no-untyped-call]
        return whole.flatten(0, 1)


def causal_mask(filled_bT: Tensor) -> Tensor:
    """[b, 1, T, T] bool: causal among the tokens of each row; padding sees itself, for softmax needs something."""
    tokens = filled_bT.shape[1]
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=filled_bT.device).tril()
    itself = torch.eye(tokens, dtype=torch.bool, device=filled_bT.device)
    return ((causal & filled_bT.unsqueeze(1)) | itself).unsqueeze(1)


def _exchanged(parts: Tensor, group: ProcessGroup) -> Tensor:
    """The parts [R, …] that the ranks have for this one."""
    result: Tensor = _Exchange.apply(parts, group)  # type: ignore[no-untyped-call]
    return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        sent = parts.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        sent = gradient.contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=ctx.group)
        return received, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, chosen: Tensor, count: int, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(chosen)
        whole = own.new_zeros(own.shape[0], count, *own.shape[2:])
        whole[:, chosen] = own
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (chosen,) = ctx.saved_tensors
        return gradient[:, chosen], None, None, None
