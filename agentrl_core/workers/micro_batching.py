"""Cutting a batch into micro-batches: of rows that begin alike where rows are packed, else of rows of similar length.

Shapes: B rows of a batch, b of a micro-batch; P prompt tokens, R response tokens.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl_core.api.errors import ProtocolError, WorkerError
from agentrl_core.api.training_backend import EXPERTS, IMAGES, SEQUENCE_COLUMNS, Columns, MicroBatch
from agentrl_core.protocol import DataProto
from agentrl_core.protocol.ragged import Order, RaggedColumn, Rows, converted, on_values, ragged, together, values_in
from agentrl_core.protocol.rows import counts
from agentrl_core.workers.image_columns import at_features, image_numbers
from agentrl_core.workers.ranks import TrainingRanks

RESPONSE_COLUMNS = ("responses", "response_mask")
_MASKS = ("attention_mask", "response_mask")

WORTHWHILE = 0.9
"""Share of the padded tokens above which packing only costs."""
MOST_SHARING = 4
"""Tokens of all packed rows for each token that is computed: attention copies the keys and values of every row."""

ALONE = TrainingRanks()


def columns_of(batch: DataProto, names: tuple[str, ...], method: str) -> Columns:
    """The sequence and response columns of a batch, and ``names`` [B, R] as float32 with 0 under mask 0.

    Raises ProtocolError that names what is missing.
    """
    wanted = (*SEQUENCE_COLUMNS, *RESPONSE_COLUMNS, *names)
    check_columns(batch, wanted, method)
    columns: Columns = {name: batch.batch[name] for name in wanted}
    mask_BR = columns["response_mask"] = converted(columns["response_mask"], torch.bool)
    # Fillers under mask 0 may be anything, and 0 * NaN in a backward pass is NaN.
    return columns | {name: under_mask(mask_BR, columns[name]) for name in names}


def expert_column(experts: "Sequence[np.ndarray[Any, Any]]", attention_BL: Tensor, method: str) -> Tensor:
    """The column :data:`EXPERTS` of rows.

    Args:
        experts: [tokens, N, k] of the first tokens of each row.

    Raises:
        ProtocolError: a row has fewer tokens.
    """
    filled_BL = attention_BL.bool().cpu().numpy()
    kind = np.result_type(*experts)
    column_BLNk = np.full((*filled_BL.shape, *experts[0].shape[1:]), np.iinfo(kind).max, kind)
    for row, (own, filled_L) in enumerate(zip(experts, filled_BL, strict=True)):
        places = np.flatnonzero(filled_L)
        if len(own) > len(places) or own.shape[1:] != experts[0].shape[1:]:
            raise ProtocolError(
                f"{method}: row {row} has {len(places)} tokens, and {EXPERTS} of shape {list(own.shape)}; expected "
                f"[at most {len(places)}, {', '.join(map(str, experts[0].shape[1:]))}]"
            )
        column_BLNk[row, places[: len(own)]] = own
    return torch.from_numpy(column_BLNk)


def under_mask(mask_BR: Tensor, column_BR: Tensor) -> Tensor:
    """The column as float32, 0 under mask 0."""
    return on_values(lambda mask, column: torch.where(mask, column.float(), 0.0), mask_BR, column_BR)


def response_rows(columns: Mapping[str, Tensor]) -> Rows:
    """Where the response tokens of a batch are."""
    if (mask := ragged(columns["response_mask"])) is not None:
        return mask.rows
    width = columns["response_mask"].shape[1]
    return Rows.of(counts(columns["attention_mask"][:, -width:]).numpy(), width)


def check_columns(batch: DataProto, names: tuple[str, ...], method: str) -> None:
    """Raise ProtocolError that names what is missing."""
    present = set(batch.batch.keys()) if batch.batch is not None else set()
    missing = [name for name in names if name not in present]
    if missing:
        raise ProtocolError(f"{method} needs the columns {missing}, the batch has {sorted(present)}")


def narrowed(batch: DataProto, names: tuple[str, ...]) -> DataProto:
    """What :func:`columns_of` takes of a batch, ``names`` as far as the batch has them, in fewer bytes: it is sent to
    every rank. Numbers of tokens, positions, turns and versions are below 2^31."""
    present = batch.batch.keys()
    wanted = [*SEQUENCE_COLUMNS, *RESPONSE_COLUMNS, *(name for name in names if name in present)]
    objects = [name for name in ("uid", IMAGES, *names) if name in batch.non_tensor_batch]
    small = batch.select([name for name in wanted if name in present], objects)
    for name in small.batch.keys():
        column = small.batch[name]
        if name in _MASKS:
            small.batch[name] = converted(column, torch.bool)
        elif column.dtype == torch.int64:
            small.batch[name] = converted(column, torch.int32)
    return small


def take(columns: Columns, rows: Tensor) -> Columns:
    """The columns of these rows ([n] int64)."""
    taken: dict[int, RaggedColumn] = {}

    def chosen(column: Tensor) -> Tensor:
        kept = ragged(column)
        return column[rows.to(column.device)] if kept is None else kept.take(rows.cpu().numpy(), taken)

    return {name: chosen(column) for name, column in columns.items()}


def counts_of(mask_BW: Tensor) -> Tensor:
    """[B] int64: how many values of each row are not 0."""
    return mask_BW.sum(-1) if ragged(mask_BW) is None else counts(mask_BW)


def scattered(values_n: Tensor, places_br: Tensor) -> Tensor:
    """Values [b, r] at their places (bool, n of them set, row after row), 0 elsewhere."""
    zeros_br = torch.zeros(places_br.shape, dtype=values_n.dtype, device=values_n.device)
    return zeros_br.masked_scatter(places_br, values_n)


@dataclass(frozen=True)
class Prefixes:
    """Rows in an order in which those that begin with the same tokens, ids and positions, stand next to each other.
    Tokens of images are the same where the images are, and tokens whose experts are given where these are.

    A token that a row shares with any row before it, it shares with the row just before it.

    Args:
        rows: their numbers, in this order.
        lengths: tokens of each.
        shared: tokens that each has in common with the row before it, from the first one on.
    """

    rows: list[int]
    lengths: list[int]
    shared: list[int]

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return zip(self.rows, self.lengths, self.shared, strict=True)

    @property
    def tokens(self) -> int:
        """Different tokens of all rows."""
        return sum(self.lengths) - sum(self.shared)


def prefixes_of(columns: Columns) -> Prefixes | None:
    """None where rows cannot be packed: one has no prompt, or positions have several dimensions."""
    found = _tokens_of(columns)
    if found is None:
        return None
    # Bytes are compared quickly, and whole tokens share their first bytes only as far as they are the same.
    tokens, kind = found
    rows = sorted(range(len(tokens)), key=tokens.__getitem__)
    sorted_tokens = [np.frombuffer(tokens[row], kind) for row in rows]
    shared = [0, *(_common(*pair) for pair in pairwise(sorted_tokens))]
    return Prefixes(rows, [len(each) for each in sorted_tokens], shared[: len(rows)])


def _tokens_of(columns: Columns) -> tuple[list[bytes], Any] | None:
    """The tokens of each row, and the type in which they are bytes."""
    width_P = columns["input_ids"].shape[1] - columns["responses"].shape[1]
    if (rows := plain_rows(columns)) is not None:
        if not (rows.first_B < width_P).all():
            return None
        # Where positions follow from lengths, ids are all that a token is.
        flat = values_in(columns["input_ids"], rows).astype(np.int32, copy=IMAGES in columns)
        ends = zip(rows.starts_B.tolist(), rows.ends_B.tolist(), strict=True)
        ids_B = [flat[start:end] for start, end in ends]
        _mark_images(ids_B, columns)
        if EXPERTS in columns:
            return _with_experts([ids_l[:, None] for ids_l in ids_B], columns), np.int64
        return [ids_l.tobytes() for ids_l in ids_B], np.int32
    ids_BL, attention_BL, positions_BL = (columns[name].cpu().numpy() for name in SEQUENCE_COLUMNS)
    if positions_BL.ndim != 2 or not attention_BL[:, :width_P].any(-1).all():
        return None
    are_tokens_BL = attention_BL.astype(bool)
    ids_B = [ids_L[is_token_L] for ids_L, is_token_L in zip(ids_BL, are_tokens_BL, strict=True)]
    _mark_images(ids_B, columns)
    pairs = [
        np.stack([ids_l, positions_L[is_token_L]], -1).astype(np.int32)
        for ids_l, is_token_L, positions_L in zip(ids_B, are_tokens_BL, positions_BL, strict=True)
    ]
    tokens = _with_experts(pairs, columns) if EXPERTS in columns else [pair_l2.tobytes() for pair_l2 in pairs]
    return tokens, np.int64


def _with_experts(tokens_B: "list[np.ndarray[Any, Any]]", columns: Columns) -> list[bytes]:
    """The tokens of each row, [l, ...] integers, with their experts, as a hash of 64 bits each."""
    filled_BL = columns["attention_mask"].bool().cpu().numpy()
    experts_BLc = columns[EXPERTS].flatten(2).cpu().numpy()
    generator, hashed = np.random.default_rng(0), []
    factors = generator.integers(0, 2**63, experts_BLc.shape[2] + 2, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    for tokens_l, experts_Lc, filled_L in zip(tokens_B, experts_BLc, filled_BL, strict=True):
        values_lc = np.concatenate([tokens_l, experts_Lc[filled_L]], 1).astype(np.int64).view(np.uint64)
        hashed.append((values_lc @ factors[: values_lc.shape[1]]).tobytes())
    return hashed


def _mark_images(ids_B: "list[np.ndarray[Any, Any]]", columns: Columns) -> None:
    """Give the tokens that images' features replace, in each row's ids, one number below 0 for each image."""
    if IMAGES not in columns:
        return
    images_BM4 = columns[IMAGES]
    for ids_l, images_M4, numbers_M in zip(ids_B, images_BM4.numpy(), image_numbers(images_BM4), strict=True):
        places, images = at_features(ids_l, images_M4)
        ids_l[places] = -1 - numbers_M[images]


def plain_rows(columns: Columns) -> Rows | None:
    """Where the tokens of rows without padding are; None where masks and positions do not follow from lengths."""
    found = together(*(columns[name] for name in SEQUENCE_COLUMNS))
    if found is None:
        return None
    ids, attention, positions = found
    return ids.rows if attention.source.derived and isinstance(positions.source, Order) else None


def _common(one: "np.ndarray[Any, Any]", other: "np.ndarray[Any, Any]") -> int:
    shorter = min(len(one), len(other))
    is_same = one[:shorter] == other[:shorter]
    return shorter if is_same.all() else int(is_same.argmin())


def pays(tokens: int, padded: int) -> bool:
    """Whether packing helps where so many of the ``padded`` tokens are different ones."""
    return tokens <= WORTHWHILE * padded


@dataclass(frozen=True)
class _Size:
    """Of a micro-batch to which rows are added."""

    rows: int = 0
    prompt: int = 0
    response: int = 0
    tokens: int = 0
    different: int = 0
    sampled: int = 0

    def with_row(self, prompt: int, response: int, length: int, shared: int, sampled: int) -> "_Size":
        shared = shared if self.rows else 0
        return _Size(
            self.rows + 1, max(self.prompt, prompt), max(self.response, response), self.tokens + length,
            self.different + length - shared, self.sampled + sampled,
        )  # fmt: skip

    @property
    def computed(self) -> int:
        """Tokens of its forward pass, or logits, or what attention copies, whichever is most."""
        padded = self.rows * (self.prompt + self.response)
        if not pays(self.different, padded):
            return padded
        return max(self.different, self.sampled, -(-self.tokens // MOST_SHARING))


def micro_batches(columns: Columns, max_tokens: int, by_prefix: bool = False) -> list[MicroBatch]:
    """Cut a batch: rows sorted by length, collected so that b * (p + r) <= ``max_tokens``.

    A row that alone is longer is its own micro-batch. Every row is in exactly one micro-batch, and none is empty.
    The largest comes first: a batch that does not fit into memory fails at once.

    Args:
        by_prefix: rows will be packed. Those that begin alike stay together as far as they fit, and a token that rows
            share counts once; but a micro-batch has at most ``max_tokens`` sampled tokens, and its rows together
            :data:`MOST_SHARING` times as many tokens.
    """
    width_L, width_R = columns["input_ids"].shape[1], columns["responses"].shape[1]
    width_P = width_L - width_R
    if (places := plain_rows(columns)) is not None:
        prompts = np.maximum(width_P - places.first_B, 1).tolist()
        responses = np.maximum(places.first_B + places.lengths_B - width_P, 1).tolist()
    else:
        attention_BL = columns["attention_mask"].bool()
        prompts = _extent(attention_BL[:, :width_P].flip(-1))
        responses = _extent(attention_BL[:, width_P:])
    prefixes = prefixes_of(columns) if by_prefix else None
    if prefixes is None:
        padded = [(prompt + response, prompt) for prompt, response in zip(prompts, responses, strict=True)]
        rows = sorted(range(len(padded)), key=padded.__getitem__, reverse=True)
        # With all padding, so that packing never pays.
        prefixes = Prefixes(rows, [width_L] * len(rows), [0] * len(rows))
    sampled = counts_of(columns["response_mask"]).tolist()

    packs: list[list[int]] = []
    sizes: list[_Size] = []
    for row, length, shared in prefixes:
        of_row = (prompts[row], responses[row], length, shared, sampled[row])
        if not packs or (size := sizes[-1].with_row(*of_row)).computed > max_tokens:
            packs.append([])
            sizes.append(size := _Size().with_row(*of_row))
        packs[-1].append(row)
        sizes[-1] = size
    order = sorted(range(len(packs)), key=lambda number: sizes[number].computed, reverse=True)
    return [_cropped(columns, packs[number], width_P, prompts, responses) for number in order]


def empty_micro_batch(columns: Columns) -> MicroBatch:
    """One row of two tokens, none of them sampled: a rank without rows takes part in a pass and adds nothing."""
    widths = {name: 2 if name in SEQUENCE_COLUMNS else 1 for name in columns}
    made = {
        name: torch.zeros(1, *column.shape[1:-1], widths[name], dtype=column.dtype)
        for name, column in columns.items()
        if name not in (IMAGES, EXPERTS)
    }
    if EXPERTS in columns:
        unknown = torch.iinfo(columns[EXPERTS].dtype).max
        made[EXPERTS] = torch.full((1, 2, *columns[EXPERTS].shape[2:]), unknown, dtype=columns[EXPERTS].dtype)
    if IMAGES in columns:
        made[IMAGES] = torch.full((1, *columns[IMAGES].shape[1:]), -1)
    made["attention_mask"][:] = 1
    made["position_ids"][..., 1] = 1
    return MicroBatch(torch.zeros(0, dtype=torch.long), made)


def rank_of_rows(columns: Columns, size: int, by_prefix: bool) -> Tensor:
    """The rank ([B] int64, below ``size``) that works on each row; every rank gets about as many tokens.

    Rows are dealt out by length. ``by_prefix``, each rank gets rows that begin alike, so that the rank with the most
    different tokens has as few as possible.
    """
    lengths_B = counts_of(columns["attention_mask"])
    ranks_B = torch.zeros_like(lengths_B, dtype=torch.long)
    if by_prefix and (prefixes := prefixes_of(columns)) is not None:
        enough = bisect_left(
            range(prefixes.tokens), True, key=lambda tokens: max(_shares(prefixes, tokens), default=0) < size
        )
        ranks_B[prefixes.rows] = torch.tensor(_shares(prefixes, enough), dtype=torch.long, device=ranks_B.device)
        return ranks_B
    order_B = torch.argsort(lengths_B, descending=True, stable=True)
    places_B = torch.arange(len(order_B), device=order_B.device)
    turn_B, rank_B = places_B // size, places_B % size
    # Forwards and backwards alternately, or rank 0 would get the longest of every turn.
    ranks_B[order_B] = torch.where(turn_B % 2 == 0, rank_B, size - 1 - rank_B)
    return ranks_B


def _shares(prefixes: Prefixes, tokens: int) -> list[int]:
    """The number of each row's share: consecutive rows that have at most so many different tokens, or one row."""
    shares: list[int] = []
    share, filled = -1, tokens
    for _, length, shared in prefixes:
        filled += length - shared
        if filled > tokens:
            share, filled = share + 1, length
        shares.append(share)
    return shares


def share_of_rows(columns: Columns, ranks: TrainingRanks, by_prefix: bool = False) -> Tensor:
    """The rows ([n] int64) that this rank works on: see :func:`rank_of_rows`."""
    return (rank_of_rows(columns, ranks.share.count, by_prefix) == ranks.share.index).nonzero().squeeze(-1)


def in_step(micros: list[MicroBatch], columns: Columns, ranks: TrainingRanks) -> list[MicroBatch]:
    """As many micro-batches as the rank with the most has, empty ones at the end: every pass is a collective."""
    missing = ranks.largest(len(micros)) - len(micros)
    return [*micros, *(empty_micro_batch(columns) for _ in range(missing))]


def _extent(mask_BW: Tensor) -> list[int]:
    """1 + the last position with mask 1 of each row, at least 1: a forward pass needs something to run on."""
    positions_W = torch.arange(1, mask_BW.shape[1] + 1, device=mask_BW.device)
    extents: list[int] = (mask_BW * positions_W).amax(-1).clamp(min=1).tolist() if mask_BW.numel() else []
    return extents


def _cropped(columns: Columns, pack: list[int], width_P: int, prompts: list[int], responses: list[int]) -> MicroBatch:
    p, r = max(prompts[row] for row in pack), max(responses[row] for row in pack)
    rows = torch.tensor(pack, dtype=torch.long)
    cropped: Columns = {}
    for name, column in take(columns, rows).items():
        if name == IMAGES:
            cropped[name] = column
            continue
        if name == EXPERTS:
            cropped[name] = column[:, width_P - p : width_P + r]
            continue
        start, end = (width_P - p, width_P + r) if name in SEQUENCE_COLUMNS else (0, r)
        kept = ragged(column)
        cropped[name] = column[..., start:end] if kept is None else kept.part(start, end - start).padded()
    return MicroBatch(rows, cropped, _is_plain(cropped["attention_mask"].bool(), cropped["position_ids"]))


def _is_plain(attention_bl: Tensor, positions: Tensor) -> bool:
    order_l = torch.arange(attention_bl.shape[1], device=attention_bl.device)
    if positions.shape != attention_bl.shape:
        return False
    has_gaps = (attention_bl != (order_l < attention_bl.sum(-1, keepdim=True))).any()
    return not has_gaps and bool((positions == order_l)[attention_bl].all())


def map_micro_batches(
    columns: Columns,
    max_tokens: int,
    device: torch.device,
    function: Callable[[Sequence[MicroBatch]], Iterable[tuple[Tensor, ...]]],
    names: tuple[str, ...],
    ranks: TrainingRanks = ALONE,
    by_prefix: bool = False,
) -> Columns:
    """Results [b, r] of ``function`` for the micro-batches as columns ``names`` [B, R] on the CPU, in batch order.

    They are float32, and 0 under mask 0, and where a rank has no results. ``by_prefix`` as in :func:`micro_batches`.
    Over several ranks each has its own batch, and all of them must call this.

    Raises:
        WorkerError: there are fewer results than micro-batches, or they have another shape.
    """
    mask_BR = columns["response_mask"].cpu()
    mask = ragged(mask_BR)
    shape = mask_BR.shape if mask is None else (mask.rows.size,)
    results = {name: torch.zeros(shape, dtype=torch.float32) for name in names}
    cut = in_step(micro_batches(columns, max_tokens, by_prefix), columns, ranks)
    micros = [micro.to(device) for micro in cut]
    computed = iter(function(micros))
    for number, micro in enumerate(cut):
        if (outputs := next(computed, None)) is None:
            raise WorkerError(f"the training backend returned {number} outputs for {len(cut)} micro-batches")
        for name, output_br in zip(names, outputs, strict=bool(outputs)):
            check_shape(name, output_br, micro)
            if mask is not None:
                _write(results[name], mask.rows, micro.rows, output_br.float().cpu())
            elif len(micro.rows):
                results[name][micro.rows, : output_br.shape[1]] = output_br.float().cpu()
    if next(computed, None) is not None:
        raise WorkerError(f"the training backend returned more outputs than the {len(cut)} micro-batches")
    if mask is None:
        return {name: torch.where(mask_BR, result_BR, 0.0) for name, result_BR in results.items()}
    return {name: under_mask(mask, mask.like(result.numpy())) for name, result in results.items()}


def check_shape(name: str, values: Tensor | None, micro: MicroBatch) -> None:
    """Raise WorkerError where a training backend returned no values [b, r] for a micro-batch."""
    expected, found = list(micro["responses"].shape), None if values is None else list(values.shape)
    if found != expected:
        raise WorkerError(
            f"the training backend returned {name} of shape {found} for a micro-batch with responses of {expected}"
        )


def _write(values_N: Tensor, rows: Rows, index_b: Tensor, output_br: Tensor) -> None:
    """Put the results of some rows among the values of all."""
    starts_b, ends_b = (each[index_b.numpy()].tolist() for each in (rows.starts_B, rows.ends_B))
    # The empty micro-batch of a rank without rows has a row that is none of these.
    for start, end, output_r in zip(starts_b, ends_b, output_br, strict=False):
        values_N[start:end] = output_r[: end - start]
