"""Attention within the rows of a packed sequence, and the models that can do with it.

Shapes: T tokens of the packed sequence, H heads, D size of a head, n predicted tokens.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from agentrl_core.api.errors import ConfigError, WorkerError
from agentrl_core.api.training_backend import Columns, MicroBatch
from agentrl_core.fsdp2.media import Media
from agentrl_core.fsdp2.mesh import Peers
from agentrl_core.fsdp2.models import vocabulary_of
from agentrl_core.fsdp2.packing import BlockLayout, ForwardPass, VarlenLayout, look_up, pack
from agentrl_core.fsdp2.sequence_parallel import SequencePart
from agentrl_core.fsdp2.split import WHOLE, Split
from agentrl_core.plugins.boundary import boundary

logger = logging.getLogger(__name__)

Compute = Callable[[MicroBatch], tuple[Tensor, Tensor]]

PACKED = "agentrl_packed"
VARLEN = "agentrl_varlen"
SEQUENCE = "agentrl_sequence"
PROBE = "agentrl_probe"
VARLEN_DTYPES = (torch.bfloat16, torch.float16)
"""What FlashAttention computes in."""
NOT_PACKABLE = ("sliding_window", "position_bias", "softcap", "s_aux")
"""What some models hand to attention besides what is usual; packed attention cannot use it."""


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed_layout: BlockLayout | None = None,
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
    _check_packable(module, kwargs)
    tables = [states.transpose(1, 2).flatten(2).squeeze(0) for states in (query, key, value)]

    def heads(table: Tensor, index: Tensor) -> Tensor:
        return look_up(table, index).view(*index.shape, -1, query.shape[-1]).transpose(1, 2)

    def attend(queries: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
        states = heads(tables[0], queries), heads(tables[1], keys), heads(tables[2], keys)
        result: Tensor = sdpa_attention_forward(module, *states, mask, **kwargs)[0]
        return result.flatten(2).flatten(0, 1)

    results = torch.cat([attend(each.queries, each.keys, each.seen) for each in packed_layout.blocks])
    results_Tc = look_up(results, packed_layout.slots)
    return results_Tc.view(1, query.shape[2], query.shape[1], -1), None


def varlen_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed_layout: VarlenLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As :func:`packed_attention`, with FlashAttention over sequences of any length: no padding, no masks, and no
    copies of heads that several query heads share.

    A row's own tokens end where the row ends, which is how the kernel aligns a causal mask.

    Raises:
        WorkerError: the model's attention has something that cannot be packed, or computes in another data type.
    """
    if packed_layout is None:
        return packed_attention(module, query, key, value, attention_mask, **kwargs)
    _check_packable(module, kwargs)
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    if dtype not in VARLEN_DTYPES:
        raise WorkerError(f"FlashAttention takes bfloat16 and float16, {type(module).__name__} computes in {dtype}")
    query_THD, key_THD, value_THD = (
        states.squeeze(0).transpose(0, 1).to(dtype) for states in (query, key, value)
    )  # fmt: skip
    row_keys, row_values = (
        look_up(states.flatten(1), packed_layout.row_tokens).view(-1, *states.shape[1:])
        for states in (key_THD, value_THD)
    )
    result: Tensor = _varlen_attn()(
        query_THD, row_keys, row_values, packed_layout.own_starts, packed_layout.row_starts, *packed_layout.longest,
        scale=kwargs.get("scaling"), window_size=(-1, 0), enable_gqa=query_THD.shape[1] != key_THD.shape[1],
    )  # fmt: skip
    return result.to(query.dtype).unsqueeze(0), None


def sequence_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sequence_part: SequencePart | None = None,
    packed_layout: BlockLayout | VarlenLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a sequence whose tokens are spread over ranks, packed or padded; without a part ``sdpa``.

    Args:
        query: [b, H, m, D] of this rank's tokens.

    Raises:
        WorkerError: the model's attention has something that cannot be packed.
    """
    if sequence_part is None:
        return packed_attention(module, query, key, value, attention_mask, **kwargs)
    _check_packable(module, kwargs)
    query, key, value = (sequence_part.heads(each) for each in (query, key, value))
    if isinstance(packed_layout, VarlenLayout):
        result, _ = varlen_attention(module, query, key, value, attention_mask, packed_layout, **kwargs)
    else:
        mask = sequence_part.mask if packed_layout is None else attention_mask
        result, _ = packed_attention(module, query, key, value, mask, packed_layout, **kwargs)
    return sequence_part.own_tokens(result), None


def _varlen_attn() -> Any:
    # Its import takes seconds.
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


def has_varlen(device: torch.device) -> bool:
    """Whether a device may have :func:`varlen_attention`; a trial shows whether it has."""
    return device.type == "cuda"


def _check_packable(module: torch.nn.Module, arguments: dict[str, Any]) -> None:
    for name in NOT_PACKABLE:
        if arguments.get(name) is not None:
            raise WorkerError(f"{type(module).__name__} attends with {name}, which rows that are packed cannot have")


class Packing:
    """Switches a model to packed rows, if it computes the same with them.

    Args:
        model: a model of transformers.
        compute: what the model says of each predicted token [n, C], and the places [b, r] of these among the
            responses: a forward pass that packs where :func:`is_packing`.
        wanted: False leaves the model as it is.
        device: of the forward pass.
        media: of a model that is shown images: it is tried with some.
    """

    def __init__(
        self, model: Any, compute: Compute, wanted: bool, device: torch.device, media: Media | None = None
    ) -> None:
        AttentionInterface.register(PACKED, packed_attention)
        AttentionInterface.register(VARLEN, varlen_attention)
        AttentionInterface.register(SEQUENCE, sequence_attention)
        for name in (PACKED, VARLEN, SEQUENCE):
            AttentionMaskInterface.register(name, sdpa_mask)
        self._model = model
        self._implementation = PACKED
        self.is_possible = False
        self.reason = "model.packing is false"
        """Why it is not possible."""
        if not wanted:
            return
        reason = f"only sdpa attention can be packed, this model has {_attention(model)}"
        if _attention(model) == "sdpa":
            self.is_possible = True
            example = example_rows(model, media).to(device)
            reason = self._other_mask(compute, example) or self._choose(compute, example, device)
            self.is_possible = not reason
        self.reason = reason
        if reason:
            logger.info("%s computes padded rows: %s", type(model).__name__, reason)

    def spread(self, peers: Peers, packs: bool) -> Split:
        """Compute with tokens that are spread over ranks from now on, as the result says.

        Args:
            packs: rows are packed, too.
        """
        split = Split(peers, self._implementation if packs else "sdpa")
        self._implementation = SEQUENCE
        return split

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, the model packs where it can. What others see of it outside is as it was."""
        config = self._model.config.get_text_config(decoder=True)
        before = config._attn_implementation
        if self.is_possible:
            config._attn_implementation = self._implementation
        try:
            yield
        finally:
            config._attn_implementation = before

    def _other_mask(self, compute: Compute, micro: MicroBatch) -> str:
        """Why the model's masks say more than that attention is causal, "" where they do not.

        Packed rows are seen without the model's own masks, and chunks or windows are longer than any trial. So each
        mask that the model asks transformers for is compared with the causal one over all of its positions.
        """
        masks: list[Callable[..., Any]] = []

        def record(*args: Any, mask_function: Callable[..., Any], **kwargs: Any) -> Tensor | None:
            masks.append(mask_function)
            mask: Tensor | None = sdpa_mask(*args, mask_function=mask_function, **kwargs)
            return mask

        text = self._model.config.get_text_config(decoder=True)
        positions = getattr(text, "max_position_embeddings", None)
        if positions is None:
            return "its config has no max_position_embeddings, over which its masks could be compared"
        if getattr(text, "attn_temperature_tuning", False):
            return "attn_temperature_tuning depends on the place in the sequence"
        AttentionInterface.register(PROBE, sdpa_attention_forward)
        AttentionMaskInterface.register(PROBE, record)
        self._implementation = PROBE
        try:
            with torch.no_grad(), self.on():
                compute(micro)
        except Exception as error:  # noqa: BLE001 - whatever cannot be tried is computed as it always was
            return str(error)
        finally:
            self._implementation = PACKED
        if not masks:
            return "it makes its attention masks itself"
        try:
            return "" if all(_is_causal(mask, positions) for mask in masks) else "its masks have windows"
        except (IndexError, RuntimeError):
            return "its masks depend on what the tokens are"

    def _choose(self, compute: Compute, micro: MicroBatch, device: torch.device) -> str:
        """Take the first attention that is the same to the model; why none is, "" where one is."""
        reason = ""
        for self._implementation in (VARLEN, PACKED) if has_varlen(device) else (PACKED,):
            reason = self._difference(compute, micro)
            if not reason:
                return ""
            logger.info("%s cannot use %s: %s", type(self._model).__name__, self._implementation, reason)
        return reason

    def _difference(self, compute: Compute, micro: MicroBatch) -> str:
        """Why packed rows are not the same to the model, "" where they are."""
        try:
            return self._compared(compute, compute, micro, "packed ones")
        except Exception as error:  # noqa: BLE001 - whatever cannot be packed is computed as it always was
            return str(error)

    def difference_of(self, compute: Compute, spread: Compute, device: torch.device) -> str:
        """Why rows whose tokens are spread over ranks are not the same to the model, "" where they are.

        Args:
            spread: computes them, in the context :meth:`on`.
        """
        return self._compared(compute, spread, example_rows(self._model).to(device), "such rows")

    def _compared(self, compute: Compute, other: Compute, micro: MicroBatch, what: str) -> str:
        with torch.no_grad():
            expected, expected_at = compute(micro)
            with self.on():
                found, found_at = other(micro)
        expected, found = (
            values[micro["response_mask"][at]] for values, at in ((expected, expected_at), (found, found_at))
        )
        gap, largest = float((expected - found).abs().max()), float(expected.abs().max())
        return (
            ""
            if gap <= rounding(found, self._model) * largest
            else f"{what} differ by {gap:.2g}, the largest is {largest:.2g}"
        )


def _is_causal(mask_function: Callable[..., Any], positions: int) -> bool:
    """The mask of the first row lets a token see itself and all tokens before it, and no others."""
    zero, keys = torch.tensor(0), torch.arange(positions)
    for query in {
        *range(min(positions, 64)),
        *(2**power - 1 for power in range(6, positions.bit_length())),
        positions - 1,
    }:
        seen = torch.as_tensor(mask_function(zero, zero, torch.tensor(query), keys)).expand(positions)
        if not torch.equal(seen, keys <= query):
            return False
    return True


def rounding(values: Tensor, model: Any) -> float:
    """Share of the largest value by which sums in another order may differ: what is wrong shows in the first digits.

    In 8 bits, what a row is rounded to depends a little on the other rows (LLM.int8(), arXiv 2208.07339, section 3.2).
    """
    backbone = getattr(model, "backbone", model)
    dtype = torch.float16 if getattr(backbone, "is_loaded_in_8bit", False) else values.dtype
    return math.sqrt(max(torch.finfo(dtype).eps, torch.finfo(values.dtype).eps))


def check_padding(model: Any, compute: Compute, device: torch.device, key: str) -> None:
    """Compare rows with padding on their left with the same rows alone.

    Args:
        model: a model of transformers.
        compute: as of :class:`Packing`.
        device: of the forward pass.
        key: the config key that the model comes from, for messages.

    Raises:
        ConfigError: they differ, because the model counts padding as positions, or its state runs through it.
    """
    micro = example_rows(model)
    gaps, largest = [], 0.0
    with torch.no_grad():
        padded_brC = compute(micro.to(device))[0].view(*micro["responses"].shape, -1)
        for row in (2, 3):
            filled_l = micro["attention_mask"][row].bool()
            response = int(micro["response_mask"][row].sum())
            columns = {
                name: column[row : row + 1, filled_l] if column.shape[1] == len(filled_l) else
                column[row : row + 1, :response] for name, column in micro.columns.items()
            }  # fmt: skip
            alone_rC = compute(MicroBatch(torch.arange(1), columns, is_plain=True).to(device))[0]
            gaps.append(float((padded_brC[row, :response] - alone_rC).abs().max()))
            largest = max(largest, float(alone_rC.abs().max()))
    # Of all rows: half precision may send a token of one row to another expert.
    if not min(gaps) <= rounding(padded_brC, model) * largest:
        raise ConfigError(
            f"{key}: {type(model).__name__} computes something else for a row that has padding on its left: its "
            f"predictions differ by {min(gaps):.2g}, the largest is {largest:.2g}. Its log-probs would be wrong; train "
            "another model"
        )


def check_images(
    model: Any,
    media: Media,
    compute: Compute,
    alone: Callable[[dict[str, Any]], Tensor],
    device: torch.device,
    key: str,
) -> None:
    """Compare padded rows that show images with what the model computes of what its processor makes of each.

    Args:
        compute: as of :class:`Packing`.
        alone: predictions [l, C] of the model for what its processor made of one row.
        key: the config key that the model comes from, for messages.

    Raises:
        ConfigError: they differ, or the model does not run on them.
    """
    name = type(model).__name__
    with boundary(ConfigError, f"{key}: {name} cannot be trained with images:"), torch.no_grad():
        micro, wholes = media.examples()
        ours_brC = compute(micro.to(device))[0].view(*micro["responses"].shape, -1)
        gaps, largest = [], 0.0
        for row, whole in enumerate(wholes):
            alone_lC = alone({key: value.to(device) for key, value in whole.items()})
            response = int(micro["attention_mask"][row, -micro["responses"].shape[1] :].sum())
            theirs_rC = alone_lC[-response - 1 : -1]
            gaps.append(float((ours_brC[row, :response] - theirs_rC).abs().max()))
            largest = max(largest, float(theirs_rC.abs().max()))
    # Half precision may send a token of one row to another expert, but not one of most rows.
    gap = sorted(gaps)[len(gaps) // 2] if ours_brC.dtype != torch.float32 else max(gaps)
    if not gap <= rounding(ours_brC, model) * largest:
        raise ConfigError(
            f"{key}: {name} computes something else for rows with images in a batch than for each row alone: its "
            f"predictions differ by {gap:.2g}, the largest is {largest:.2g}. Its log-probs would be wrong; train "
            "another model, or train this one without images"
        )


def is_packing(model: Any) -> bool:
    """The model attends with :func:`packed_attention` or :func:`varlen_attention` now."""
    return _attention(model) in (PACKED, VARLEN)


def forward_pass(model: Any, micro: MicroBatch, media: Media | None = None, split: Split = WHOLE) -> ForwardPass:
    """Of packed rows where the model packs and where it pays; of this rank's tokens where they are spread over some."""
    whole = micro if media is None else media.completed(micro)
    inner = _attention(model) if split.sequence is None else split.attention
    rows = pack(whole, varlen=inner == VARLEN) if inner in (PACKED, VARLEN) else None
    rows = rows or ForwardPass.of(whole)
    if media is not None:
        rows = media.filled(rows, whole)
    rows = rows if whole is micro else rows.without_last_row()
    return rows if split.sequence is None else rows.spread(split.sequence)


def _attention(model: Any) -> str:
    return str(model.config.get_text_config(decoder=True)._attn_implementation)


def example_rows(model: Any, media: Media | None = None) -> MicroBatch:
    """Two prompts of different lengths with two responses each, on the CPU; two of these begin with the same tokens.
    For a model that is shown images :meth:`Media.examples`."""
    if media is not None:
        return media.examples()[0]
    lengths = [(6, 3), (6, 7), (4, 7), (4, 5)]
    attention_bl = torch.zeros(4, 13, dtype=torch.long)
    for row, (prompt, response) in enumerate(lengths):
        attention_bl[row, 6 - prompt : 6 + response] = 1
    ids_bl = (torch.arange(4 * 13).view(4, 13) * 7 + 1) % vocabulary_of(model)
    ids_bl[1, :6], ids_bl[3, :8] = ids_bl[0, :6], ids_bl[2, :8]
    columns: Columns = {
        "input_ids": ids_bl,
        "attention_mask": attention_bl,
        "position_ids": (attention_bl.cumsum(-1) - 1).clamp(min=0),
        "responses": ids_bl[:, 6:],
        "response_mask": attention_bl[:, 6:].bool(),
    }
    return MicroBatch(torch.arange(4), columns)
