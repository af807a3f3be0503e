"""Rows of a micro-batch as one sequence: no padding, and a prompt that several rows share stands in it once.

    rows                packed
    p q a b             p q a b c d e
    p q c d e

All that a transformer does token by token then costs as much as there are different tokens. Attention alone knows
where the rows are: see :mod:`agentrl_core.workers.packed_attention`.

Shapes: b rows, p prompt and r response tokens of a micro-batch; g different prompts, T tokens of the packed sequence,
n sampled tokens, k tokens that the last token of a row sees.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentrl_core.workers.micro_batching import MicroBatch, prompt_groups

WORTHWHILE = 0.9
"""Share of the padded tokens above which packing only costs."""


@dataclass(frozen=True)
class AttentionLayout:
    """Where the rows are in the packed sequence. Indices of 0 beyond the end of a prompt or row are seen by nobody.

    Args:
        prompts: [g, p] indices of each prompt's tokens.
        responses: [b, r] indices of each row's response.
        rows: [b, k] indices of each row's tokens, prompt and response.
        seen: [b or 1, 1, r, k] bool, which of ``rows`` a response token sees.
        slots: [T] where each token's result is among those of ``prompts`` and ``responses``, one after the other.
    """

    prompts: Tensor
    responses: Tensor
    rows: Tensor
    seen: Tensor
    slots: Tensor


@dataclass(frozen=True)
class Lengths:
    """Sequences that stand one after the other.

    Args:
        starts: [sequences + 1] int32, where each begins, and where the last one ends.
        longest: of their lengths.
    """

    starts: Tensor
    longest: int


@dataclass(frozen=True)
class VarlenLayout:
    """The same for attention that takes sequences of any length, one after the other: nothing is padded or masked.

    Args:
        prompts: of the g prompts, which stand first in the packed sequence.
        responses: of the b responses, which stand behind them.
        rows: of the b rows, prompt and response.
        row_tokens: [tokens of all rows] indices of each row's tokens, row after row.
        response_tokens: of all responses together.
    """

    prompts: Lengths
    responses: Lengths
    rows: Lengths
    row_tokens: Tensor
    response_tokens: int


@dataclass(frozen=True)
class PackedRows:
    """What a forward pass of packed rows takes, and which of its results are wanted.

    Args:
        input_ids: [1, T].
        position_ids: [1, T].
        layout: for attention.
        predicting: [n] index of the token after which each sampled token was sampled.
        sampled: [b, r] bool, the places of the n sampled tokens among the responses.
    """

    input_ids: Tensor
    position_ids: Tensor
    layout: AttentionLayout | VarlenLayout
    predicting: Tensor
    sampled: Tensor

    @property
    def model_inputs(self) -> dict[str, Any]:
        """What the model's forward takes. A mask of four dimensions is one that transformers leaves alone."""
        no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.input_ids.device)
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": no_mask,
            "packed_layout": self.layout,
        }


def pack(micro: MicroBatch, varlen: bool = False) -> PackedRows | None:
    """None where packing does not pay, or where rows have no prompt or positions of several dimensions.

    Args:
        varlen: attention takes a :class:`VarlenLayout`.
    """
    columns = micro.columns
    width_p = columns["input_ids"].shape[1] - columns["responses"].shape[1]
    positions_bl, attention_bl = columns["position_ids"], columns["attention_mask"].bool()
    if positions_bl.dim() != 2 or not attention_bl[:, :width_p].any(-1).all():
        return None
    group_b, first_g = prompt_groups(columns)
    prompts_gp, responses_br = attention_bl[first_g, :width_p], attention_bl[:, width_p:]
    prompt_tokens = int(prompts_gp.sum())
    if prompt_tokens + int(responses_br.sum()) > WORTHWHILE * micro.tokens:
        return None

    def packed(column_bl: Tensor) -> Tensor:
        prompts_t = column_bl[first_g, :width_p][prompts_gp]
        return torch.cat([prompts_t, column_bl[:, width_p:][responses_br]]).unsqueeze(0)

    rows_bk, ends_b = _rows(prompts_gp, responses_br, group_b)
    layout = (_varlen_layout if varlen else _layout)(prompts_gp, responses_br, rows_bk, ends_b)
    lengths_b = prompts_gp.sum(-1)[group_b]
    # The token before a response token is one place before it among the row's tokens.
    before_br = (lengths_b.unsqueeze(-1) + responses_br.cumsum(-1) - 2).clamp(min=0)
    sampled_br = columns["response_mask"] & responses_br
    return PackedRows(
        packed(columns["input_ids"]),
        packed(positions_bl),
        layout,
        rows_bk.gather(1, before_br)[sampled_br],
        sampled_br,
    )


def _rows(prompts_gp: Tensor, responses_br: Tensor, group_b: Tensor) -> tuple[Tensor, Tensor]:
    """Indices [b, k] of each row's tokens in the packed sequence, and how many they are."""
    index_gp = _numbered(prompts_gp, 0)
    index_br = _numbered(responses_br, int(prompts_gp.sum()))
    rows_bk, ends_b = _moved_left(torch.cat([index_gp[group_b], index_br], 1),
                                  torch.cat([prompts_gp[group_b], responses_br], 1))  # fmt: skip
    return rows_bk[:, : int(ends_b.max())], ends_b


def _varlen_layout(prompts_gp: Tensor, responses_br: Tensor, rows_bk: Tensor, ends_b: Tensor) -> VarlenLayout:
    filled_bk = torch.arange(rows_bk.shape[1], device=rows_bk.device) < ends_b.unsqueeze(-1)
    return VarlenLayout(
        _lengths(prompts_gp.sum(-1)), _lengths(responses_br.sum(-1)), _lengths(ends_b), rows_bk[filled_bk],
        int(responses_br.sum()),
    )  # fmt: skip


def _lengths(lengths: Tensor) -> Lengths:
    starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    return Lengths(starts, int(lengths.max()))


def _layout(prompts_gp: Tensor, responses_br: Tensor, rows_bk: Tensor, ends_b: Tensor) -> AttentionLayout:
    device = prompts_gp.device
    prompts, _ = _moved_left(_numbered(prompts_gp, 0), prompts_gp)
    responses, lengths_b = _moved_left(_numbered(responses_br, int(prompts_gp.sum())), responses_br)
    prompt_lengths_b = ends_b - lengths_b
    if (prompt_lengths_b == prompt_lengths_b[0]).all():
        prompt_lengths_b = prompt_lengths_b[:1]
    last_seen = prompt_lengths_b.view(-1, 1, 1, 1) + torch.arange(responses.shape[1], device=device).view(1, 1, -1, 1)
    seen = torch.arange(rows_bk.shape[1], device=device) <= last_seen
    filled = torch.cat([_filled(prompts_gp).flatten(), _filled(responses_br).flatten()])
    return AttentionLayout(prompts, responses, rows_bk, seen, filled.nonzero().squeeze(-1))


def _numbered(mask: Tensor, start: int) -> Tensor:
    """Consecutive numbers from ``start`` where the mask is set, row after row, and 0 elsewhere."""
    numbers = mask.flatten().cumsum(0).view(mask.shape) - 1 + start
    return torch.where(mask, numbers, 0)


def _moved_left(index: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """What the mask selects at the beginning of each row, and how many they are."""
    order = (~mask).to(torch.uint8).argsort(dim=-1, stable=True)
    return index.gather(1, order), mask.sum(-1)


def _filled(mask: Tensor) -> Tensor:
    """The same number of places of each row, at its beginning."""
    return torch.arange(mask.shape[1], device=mask.device) < mask.sum(-1, keepdim=True)
