"""Cutting a batch into micro-batches of similar rows, without their common padding.

Shapes: B rows of a batch, b of a micro-batch; P prompt tokens, R response tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agentrl_core.api.errors import ProtocolError, WorkerError
from agentrl_core.protocol import DataProto
from agentrl_core.workers.data_parallel import DataParallel

SEQUENCE_COLUMNS = ("input_ids", "attention_mask", "position_ids")
RESPONSE_COLUMNS = ("responses", "response_mask")
_MASKS = ("attention_mask", "response_mask")

Columns = dict[str, Tensor]
ALONE = DataParallel()


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a batch, cropped to their own longest prompt and response.

    Args:
        rows: [b] int64, their places in the batch.
        columns: ``SEQUENCE_COLUMNS`` [b, p+r] and response columns [b, r]; ``response_mask`` is bool.
        is_plain: every row begins with its first token, at position 0, and has no gap. Causal attention then needs no
            mask, for what stands behind a row's end is seen by nobody; without a mask it is faster.
    """

    rows: Tensor
    columns: Columns
    is_plain: bool = False

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    @property
    def tokens(self) -> int:
        """Padded tokens of its forward pass."""
        return self.columns["input_ids"].numel()

    def to(self, device: torch.device) -> "MicroBatch":
        """On the device of a forward pass, integers as models take them."""
        columns = {name: column.to(device) for name, column in self.columns.items()}
        return replace(self, columns={name: _widened(name, column) for name, column in columns.items()})

    @property
    def model_inputs(self) -> Columns:
        """What the model's forward takes."""
        return {name: self.columns[name] for name in SEQUENCE_COLUMNS if name == "input_ids" or not self.is_plain}

    def __str__(self) -> str:
        rows = ", ".join(str(row) for row in self.rows[:8].tolist()) + (", …" if len(self.rows) > 8 else "")
        return f"micro-batch of {len(self.rows)} rows and {self.tokens} padded tokens (rows {rows} of the batch)"


def columns_of(batch: DataProto, names: tuple[str, ...], method: str) -> Columns:
    """The sequence and response columns of a batch, and ``names`` [B, R] as float32 with 0 under mask 0.

    Raises ProtocolError that names what is missing.
    """
    wanted = (*SEQUENCE_COLUMNS, *RESPONSE_COLUMNS, *names)
    present = set(batch.batch.keys()) if batch.batch is not None else set()
    missing = [name for name in wanted if name not in present]
    if missing:
        raise ProtocolError(f"{method} needs the columns {missing}, the batch has {sorted(present)}")
    columns: Columns = {name: batch.batch[name] for name in wanted}
    mask_BR = columns["response_mask"] = columns["response_mask"].bool()
    # Fillers under mask 0 may be anything, and 0 * NaN in a backward pass is NaN.
    return columns | {name: torch.where(mask_BR, columns[name].float(), 0.0) for name in names}


def narrowed(batch: DataProto, names: tuple[str, ...]) -> DataProto:
    """What :func:`columns_of` takes of a batch, ``names`` as far as the batch has them, in fewer bytes: it is sent to
    every rank. Numbers of tokens, positions, turns and versions are below 2^31."""
    present = batch.batch.keys()
    wanted = [*SEQUENCE_COLUMNS, *RESPONSE_COLUMNS, *(name for name in names if name in present)]
    objects = [name for name in ("uid",) if name in batch.non_tensor_batch]
    small = batch.select([name for name in wanted if name in present], objects)
    for name in small.batch.keys():
        column = small.batch[name]
        if name in _MASKS:
            small.batch[name] = column.bool()
        elif column.dtype == torch.int64:
            small.batch[name] = column.int()
    return small


def _widened(name: str, column: Tensor) -> Tensor:
    return column.long() if column.dtype == torch.int32 or name == "attention_mask" else column


def take(columns: Columns, rows: Tensor) -> Columns:
    """The columns of these rows ([n] int64)."""
    return {name: column[rows.to(column.device)] for name, column in columns.items()}


def in_place(values_n: Tensor, places_br: Tensor) -> Tensor:
    """Values [b, r] at their places (bool, n of them set, row after row), 0 elsewhere."""
    zeros_br = torch.zeros(places_br.shape, dtype=values_n.dtype, device=values_n.device)
    return zeros_br.masked_scatter(places_br, values_n)


def prompt_groups(columns: Columns) -> tuple[Tensor, Tensor]:
    """The number [B] of each row's prompt among the different prompts, and the first row [g] of each of these."""
    attention_BL = columns["attention_mask"].bool()
    width_P = attention_BL.shape[1] - columns["responses"].shape[1]
    attention_BP = attention_BL[:, :width_P]
    parts = [columns[name][..., :width_P].reshape(len(attention_BP), -1, width_P) for name in SEQUENCE_COLUMNS]
    # What stands in the padding is of no interest.
    prompts = torch.cat([part * attention_BP.unsqueeze(1) for part in parts], 1).flatten(1)
    _, group_B = torch.unique(prompts, dim=0, return_inverse=True)
    rows_B = torch.arange(len(group_B), device=group_B.device)
    first_g = rows_B.new_full((int(group_B.max()) + 1,), len(group_B))
    return group_B, first_g.scatter_reduce(0, group_B, rows_B, "amin")


def micro_batches(columns: Columns, max_tokens: int, by_prompt: bool = False) -> list[MicroBatch]:
    """Cut a batch: rows sorted by length, collected so that b * (p + r) <= ``max_tokens``.

    A row that alone is longer is its own micro-batch. Every row is in exactly one micro-batch, and none is empty.

    Args:
        by_prompt: rows of the same prompt stay together as far as they fit, also where their lengths differ.
    """
    attention_BL, width_R = columns["attention_mask"].bool(), columns["responses"].shape[1]
    width_P = attention_BL.shape[1] - width_R
    prompts = _extent(attention_BL[:, :width_P].flip(-1))
    responses = _extent(attention_BL[:, width_P:])
    # Longest first: a batch that does not fit into memory fails at once, not after all of its short rows.
    lengths = [(prompt + response, prompt) for prompt, response in zip(prompts, responses, strict=True)]
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    if by_prompt and order:
        groups = prompt_groups(columns)[0].tolist()
        places: dict[int, int] = {}
        for row in order:
            places.setdefault(groups[row], len(places))
        order.sort(key=lambda row: places[groups[row]])

    packs: list[list[int]] = []
    longest_p = longest_r = 0
    for row in order:
        p, r = max(longest_p, prompts[row]), max(longest_r, responses[row])
        if not packs or (len(packs[-1]) + 1) * (p + r) > max_tokens:
            packs.append([])
            p, r = prompts[row], responses[row]
        packs[-1].append(row)
        longest_p, longest_r = p, r
    return [_cropped(columns, pack, width_P, prompts, responses) for pack in packs]


def empty_micro_batch(columns: Columns) -> MicroBatch:
    """One row of two tokens, none of them sampled: a rank without rows takes part in a pass and adds nothing."""
    widths = {name: 2 if name in SEQUENCE_COLUMNS else 1 for name in columns}
    made = {
        name: torch.zeros(1, *column.shape[1:-1], widths[name], dtype=column.dtype) for name, column in columns.items()
    }
    made["attention_mask"][:] = 1
    made["position_ids"][..., 1] = 1
    return MicroBatch(torch.zeros(0, dtype=torch.long), made)


def rank_of_rows(columns: Columns, size: int, by_prompt: bool) -> Tensor:
    """The rank ([B] int64, below ``size``) that works on each row; every rank gets about as many tokens.

    Rows are dealt out by length; ``by_prompt``, a rank gets all rows of a prompt unless its share ends among them.
    """
    lengths_B = columns["attention_mask"].sum(-1)
    ranks_B = torch.zeros_like(lengths_B)
    if by_prompt and len(lengths_B):
        order_B = torch.argsort(prompt_groups(columns)[0], stable=True)
        ends_B = lengths_B[order_B].cumsum(0)
        twice_middles_B = 2 * ends_B - lengths_B[order_B]
        ranks_B[order_B] = twice_middles_B * size // (2 * ends_B[-1])
        return ranks_B
    order_B = torch.argsort(lengths_B, descending=True, stable=True)
    places_B = torch.arange(len(order_B), device=order_B.device)
    turn_B, rank_B = places_B // size, places_B % size
    # Forwards and backwards alternately, or rank 0 would get the longest of every turn.
    ranks_B[order_B] = torch.where(turn_B % 2 == 0, rank_B, size - 1 - rank_B)
    return ranks_B


def share_of_rows(columns: Columns, parallel: DataParallel, by_prompt: bool = False) -> Tensor:
    """The rows ([n] int64) that this rank works on: see :func:`rank_of_rows`."""
    return (rank_of_rows(columns, parallel.size, by_prompt) == parallel.rank).nonzero().squeeze(-1)


def in_step(micros: list[MicroBatch], columns: Columns, parallel: DataParallel) -> list[MicroBatch]:
    """As many micro-batches as the rank with the most has, empty ones at the end: every pass is a collective."""
    missing = parallel.largest(len(micros)) - len(micros)
    return [*micros, *(empty_micro_batch(columns) for _ in range(missing))]


def _extent(mask_BW: Tensor) -> list[int]:
    """1 + the last position with mask 1 of each row, at least 1: a forward pass needs something to run on."""
    positions_W = torch.arange(1, mask_BW.shape[1] + 1, device=mask_BW.device)
    extents: list[int] = (mask_BW * positions_W).amax(-1).clamp(min=1).tolist() if mask_BW.numel() else []
    return extents


def _cropped(columns: Columns, pack: list[int], width_P: int, prompts: list[int], responses: list[int]) -> MicroBatch:
    p, r = max(prompts[row] for row in pack), max(responses[row] for row in pack)
    rows = torch.tensor(pack, dtype=torch.long)
    cropped = {
        name: column[..., width_P - p : width_P + r] if name in SEQUENCE_COLUMNS else column[..., :r]
        for name, column in take(columns, rows).items()
    }
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
    function: Callable[[MicroBatch], tuple[Tensor, ...]],
    names: tuple[str, ...],
    setting: str,
    parallel: DataParallel = ALONE,
    by_prompt: bool = False,
) -> Columns:
    """Results [b, r] of ``function`` for every micro-batch as columns ``names`` [B, R] on the CPU, in batch order.

    They are float32, and 0 under mask 0. ``setting`` is the config key of ``max_tokens``, ``by_prompt`` as in
    :func:`micro_batches`. Raises WorkerError where memory runs out. Over several ranks each has its own batch,
    and all of them must call this.
    """
    mask_BR = columns["response_mask"].cpu()
    results = {name: torch.zeros(mask_BR.shape, dtype=torch.float32) for name in names}
    for micro in in_step(micro_batches(columns, max_tokens, by_prompt), columns, parallel):
        with memory_errors(micro, setting):
            outputs = function(micro.to(device))
        for name, output_br in zip(names, outputs, strict=True):
            if len(micro.rows):
                results[name][micro.rows, : output_br.shape[1]] = output_br.float().cpu()
    return {name: torch.where(mask_BR, result_BR, 0.0) for name, result_BR in results.items()}


@contextmanager
def memory_errors(micro: MicroBatch, setting: str) -> Iterator[None]:
    """Raises WorkerError that names the micro-batch where the device's memory runs out."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise WorkerError(
            f"out of memory in a {micro}: lower {setting}, or set model.gradient_checkpointing=true ({error})"
        ) from error
