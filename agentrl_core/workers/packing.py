"""Rows of a micro-batch as one sequence: no padding, and a prompt that several rows share stands in it once.

    rows                packed
    p q a b             p q a b c d e
    p q c d e

All that a transformer does token by token then costs as much as there are different tokens. Attention alone knows
where the rows are: :func:`packed_attention` takes the place of transformers' ``sdpa`` while :meth:`Packing.on`.

Shapes: b rows, p prompt and r response tokens of a micro-batch; g different prompts, T tokens of the packed sequence,
n sampled tokens, k tokens that the last token of a row sees; H heads, D size of a head.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from agentrl_core.api.errors import WorkerError
from agentrl_core.workers.micro_batching import Columns, MicroBatch, prompt_groups

logger = logging.getLogger(__name__)

Compute = Callable[[MicroBatch], tuple[Tensor, Tensor]]

PACKED = "agentrl_packed"
WORTHWHILE = 0.9
"""Share of the padded tokens above which packing only costs."""
NOT_PACKABLE = ("sliding_window", "position_bias", "softcap", "s_aux")
"""What some models hand to attention beside the usual, and packed attention does not know."""


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
class PackedRows:
    """Args:
    input_ids: [1, T].
    position_ids: [1, T].
    layout: for :func:`packed_attention`.
    predicting: [n] index of the token after which each sampled token was sampled.
    sampled: [b, r] bool, the places of the n sampled tokens among the responses.
    """

    input_ids: Tensor
    position_ids: Tensor
    layout: AttentionLayout
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


def pack(micro: MicroBatch) -> PackedRows | None:
    """None where packing does not pay, or where rows have no prompt or positions of several dimensions."""
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

    layout = _layout(prompts_gp, responses_br, group_b)
    lengths_b = prompts_gp.sum(-1)[group_b]
    # The token before a response token is one place before it among the row's tokens.
    before_br = (lengths_b.unsqueeze(-1) + responses_br.cumsum(-1) - 2).clamp(min=0)
    sampled_br = columns["response_mask"] & responses_br
    return PackedRows(
        packed(columns["input_ids"]),
        packed(positions_bl),
        layout,
        layout.rows.gather(1, before_br)[sampled_br],
        sampled_br,
    )


def _layout(prompts_gp: Tensor, responses_br: Tensor, group_b: Tensor) -> AttentionLayout:
    device, prompt_tokens = prompts_gp.device, int(prompts_gp.sum())
    index_gp = _numbered(prompts_gp, 0)
    index_br = _numbered(responses_br, prompt_tokens)
    rows_bk, ends_b = _moved_left(torch.cat([index_gp[group_b], index_br], 1),
                                  torch.cat([prompts_gp[group_b], responses_br], 1))  # fmt: skip
    prompts, _ = _moved_left(index_gp, prompts_gp)
    responses, lengths_b = _moved_left(index_br, responses_br)
    rows_bk, width_k = rows_bk[:, : int(ends_b.max())], int(ends_b.max())
    prompt_lengths_b = ends_b - lengths_b
    if (prompt_lengths_b == prompt_lengths_b[0]).all():
        prompt_lengths_b = prompt_lengths_b[:1]
    last_seen = prompt_lengths_b.view(-1, 1, 1, 1) + torch.arange(responses.shape[1], device=device).view(1, 1, -1, 1)
    seen = torch.arange(width_k, device=device) <= last_seen
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


def rows_of(table: Tensor, index: Tensor) -> Tensor:
    """``table[index]`` along the first dimension, by a lookup whose gradient is quick on a CPU, too."""
    return functional.embedding(index, table)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed_layout: AttentionLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention [1, T, H, D] within the rows of a packed sequence, without a layout transformers' ``sdpa``.

    Args:
        query: [1, H, T, D]; key and value may have fewer heads.

    Raises:
        WorkerError: the model's attention has something that cannot be packed.
    """
    if packed_layout is None:
        plain: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return plain
    for name in NOT_PACKABLE:
        if kwargs.get(name) is not None:
            raise WorkerError(f"{type(module).__name__} attends with {name}, which rows that are packed cannot have")
    layout = packed_layout
    tables = [states.transpose(1, 2).flatten(2).squeeze(0) for states in (query, key, value)]

    def heads(table: Tensor, index: Tensor) -> Tensor:
        return rows_of(table, index).view(*index.shape, -1, query.shape[-1]).transpose(1, 2)

    def attend(queries: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
        states = heads(tables[0], queries), heads(tables[1], keys), heads(tables[2], keys)
        result: Tensor = sdpa_attention_forward(module, *states, mask, **kwargs)[0]
        return result.flatten(2).flatten(0, 1)

    prompts = attend(layout.prompts, layout.prompts, None)
    responses = attend(layout.responses, layout.rows, layout.seen)
    results_Tc = rows_of(torch.cat([prompts, responses]), layout.slots)
    return results_Tc.view(1, query.shape[2], query.shape[1], -1), None


class Packing:
    """Switches a model to packed rows, if it computes the same with them.

    Args:
        model: a model of transformers.
        compute: what the model says of each predicted token [n, C], and the places [b, r] of these among the
            responses: a forward pass that packs where :func:`is_packing`.
        wanted: False leaves the model as it is.
        device: of the forward pass.
    """

    def __init__(self, model: Any, compute: Compute, wanted: bool, device: torch.device) -> None:
        AttentionInterface.register(PACKED, packed_attention)
        AttentionMaskInterface.register(PACKED, sdpa_mask)
        self._model = model
        self.is_possible = False
        if wanted and _attention(model) == "sdpa":
            self.is_possible = True
            reason = self._difference(compute, _example(model).to(device))
            self.is_possible = not reason
            if reason:
                logger.info("%s computes padded rows: %s", type(model).__name__, reason)

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, the model packs where it can. What others see of it outside is as it was."""
        config = self._model.config.get_text_config(decoder=True)
        before = config._attn_implementation
        if self.is_possible:
            config._attn_implementation = PACKED
        try:
            yield
        finally:
            config._attn_implementation = before

    def _difference(self, compute: Compute, micro: MicroBatch) -> str:
        """Why packed rows are not the same to the model, "" where they are."""
        try:
            with torch.no_grad():
                padded, places = compute(micro)
                with self.on():
                    packed, _ = compute(micro)
        except Exception as error:  # noqa: BLE001 - whatever cannot be packed is computed as it always was
            return str(error)
        padded = padded[micro["response_mask"][places]]
        gap, largest = float((padded - packed).abs().max()), float(padded.abs().max())
        # Wrong attention shows in the first digits; sums in another order show in the last.
        precision = torch.finfo(packed.dtype).eps ** 0.5
        return "" if gap <= precision * largest else f"packed ones differ by {gap:.2g}, the largest is {largest:.2g}"


def is_packing(model: Any) -> bool:
    """The model attends with :func:`packed_attention` now."""
    return _attention(model) == PACKED


def _attention(model: Any) -> str:
    return str(model.config.get_text_config(decoder=True)._attn_implementation)


def _example(model: Any) -> MicroBatch:
    """Two prompts of different lengths with two responses each."""
    vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)
    lengths = [(6, 3), (6, 7), (4, 7), (4, 5)]
    attention_bl = torch.zeros(4, 13, dtype=torch.long)
    for row, (prompt, response) in enumerate(lengths):
        attention_bl[row, 6 - prompt : 6 + response] = 1
    ids_bl = (torch.arange(4 * 13).view(4, 13) * 7 + 1) % vocabulary
    ids_bl[1, :6], ids_bl[3, :6] = ids_bl[0, :6], ids_bl[2, :6]
    columns: Columns = {
        "input_ids": ids_bl,
        "attention_mask": attention_bl,
        "position_ids": (attention_bl.cumsum(-1) - 1).clamp(min=0),
        "responses": ids_bl[:, 6:],
        "response_mask": attention_bl[:, 6:].bool(),
    }
    return MicroBatch(torch.arange(4), columns)
