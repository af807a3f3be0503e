"""Rows of a micro-batch as one sequence: no padding, and what several rows begin with stands in it once.

    rows                packed
    p q a b             p q a b c d e
    p q a c d
    p q e

All that a transformer does token by token then costs as much as there are different tokens. Attention alone knows
where the rows are: see :mod:`agentrl_core.fsdp2.packed_attention`. A row's own tokens, those that it does not share
with the rows before it, are its end, and stand next to each other. They attend to the whole row.

Shapes: b rows, r response tokens and l = p + r tokens of a micro-batch; T tokens of the packed sequence; n sampled
tokens; k tokens of the longest row; m rows of a block, q own tokens of the longest of them.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from agentrl_core.api.training_backend import EXPERTS, MicroBatch
from agentrl_core.fsdp2.mesh import Peers
from agentrl_core.fsdp2.sequence_parallel import SequencePart, causal_mask
from agentrl_core.workers.micro_batching import Prefixes, pays, prefixes_of

Array = np.ndarray[Any, Any]

CALL = 8192
"""Pairs of query and key whose attention takes about as long as another block: so much padding a block may have."""


@dataclass(frozen=True)
class ForwardPass:
    """What a model is given for a micro-batch, and where it predicts what: packed rows, or padded ones.

    Args:
        inputs: of the model's forward.
        predicting: positions after which response tokens are predicted, in each row of ``inputs``.
        places: [b, r] bool, which response tokens these are, in the same order.
        labels: [n] ids of these, and of those that are added.
        added: tokens at the end of the n that are predicted for the sake of gradients of 0, and are in no place.
        packed: [T] where the tokens of packed rows are among those of the padded ones; None: rows are padded.
        experts: [rows, tokens, N, k] to which the tokens of ``inputs`` are sent; None: routers choose.
        part: of the tokens, which this rank has; then ``predicting`` and ``labels`` are of this part, and ``n`` below
            counts the predicted tokens of all parts. None: it has all of them.
    """

    inputs: dict[str, Any]
    predicting: Tensor
    places: Tensor
    labels: Tensor
    added: int = 0
    packed: Tensor | None = None
    experts: Tensor | None = None
    part: SequencePart | None = None

    @classmethod
    def of(cls, micro: MicroBatch) -> "ForwardPass":
        """Of padded rows."""
        mask_br, ids_bl = micro["response_mask"], micro["input_ids"]
        end = ids_bl.shape[1] - 1
        predicting = torch.arange(end - mask_br.shape[1], end, device=ids_bl.device)
        labels, experts = micro["responses"].flatten(), micro.columns.get(EXPERTS)
        return cls(dict(micro.model_inputs), predicting, torch.ones_like(mask_br), labels, experts=experts)

    def without_last_row(self) -> "ForwardPass":
        """Its predictions are computed, and belong to nobody."""
        return replace(self, places=self.places[:-1], added=int(self.places[-1].sum()))

    def spread(self, peers: Peers) -> "ForwardPass":
        """The part that this rank computes. Packed rows stay one sequence; padded ones are all cut at the same places.

        Args:
            peers: the ranks that compute the other parts.
        """
        ids_bT = self.inputs["input_ids"]
        rows, tokens = ids_bT.shape
        size = -(-tokens // peers.size)
        inputs, mask = dict(self.inputs), None
        if self.packed is None:
            if "attention_mask" in inputs:
                mask = causal_mask(inputs["attention_mask"].bool())
            inputs.setdefault("position_ids", torch.arange(tokens, device=ids_bT.device).expand(rows, tokens))
            # One of four dimensions is left alone by transformers.
            inputs["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids_bT.device)

        def own(column: Tensor, padding: int = 0) -> Tensor:
            # From the last dimension to the second one.
            sides = (0, 0) * (column.ndim - 2) + (0, size * peers.size - tokens)
            return functional.pad(column, sides, value=padding)[:, size * peers.index : size * (peers.index + 1)]

        inputs |= {name: own(inputs[name]) for name in ("input_ids", "position_ids")}
        experts = None if self.experts is None else own(self.experts, torch.iinfo(self.experts.dtype).max)
        chosen = (self.predicting // size == peers.index).nonzero().squeeze(-1)
        part = SequencePart(peers, rows, tokens, mask, chosen, len(self.predicting))
        labels = self.labels.view(rows, -1)[:, chosen].flatten()
        inputs["sequence_part"] = part
        return replace(
            self, inputs=inputs, predicting=self.predicting[chosen] - size * peers.index, labels=labels,
            experts=experts, part=part,
        )  # fmt: skip

    def own(self, values_n: Tensor) -> Tensor:
        """Of what is computed for all predicted tokens, what belongs in :attr:`places`; the rest has gradients of 0.

        Args:
            values_n: of those of this rank; the others' are added.
        """
        if self.part is not None:
            values_n = self.part.of_all(values_n)
        return values_n[: len(values_n) - self.added]

    def predicting_states(self, hidden: Tensor) -> Tensor:
        """The states [n, H] after which response tokens are predicted, of all states [rows, tokens, H]."""
        rows, width = hidden.shape[:2]
        starts = torch.arange(0, rows * width, width, device=hidden.device)
        return look_up(hidden.flatten(0, 1), (starts.unsqueeze(-1) + self.predicting).flatten())


@dataclass(frozen=True)
class Block:
    """Rows of similar size that attend together. Indices behind a row's end are any; what they give is not used.

    Args:
        queries: [m, q] indices of each row's own tokens.
        keys: [m, k] indices of each row's tokens.
        seen: [m or 1, 1, q, k] bool, which of them a token sees; None: own tokens are all tokens, attention is causal.
    """

    queries: Tensor
    keys: Tensor
    seen: Tensor | None


@dataclass(frozen=True)
class BlockLayout:
    """Where the rows are in the packed sequence.

    Args:
        blocks: of all rows that add tokens.
        slots: [T] where each token's result is among those of the blocks' queries, one block after the other.
    """

    blocks: list[Block]
    slots: Tensor


@dataclass(frozen=True)
class VarlenLayout:
    """The same for attention that takes sequences of any length, one after the other: nothing is padded or masked.

    Args:
        own_starts: [rows + 1] int32, where each row's own tokens begin, and where the last ones end.
        row_starts: the same of the rows' tokens.
        longest: number of own tokens, and of tokens, of any row.
        row_tokens: [tokens of all rows] indices of each row's tokens, row after row.
    """

    own_starts: Tensor
    row_starts: Tensor
    longest: tuple[int, int]
    row_tokens: Tensor


def pack(micro: MicroBatch, varlen: bool = False) -> ForwardPass | None:
    """Of packed rows, without response tokens that were not sampled; None where packing is impossible or does not pay.

    Args:
        varlen: attention takes a :class:`VarlenLayout`.
    """
    columns, device = micro.columns, micro["input_ids"].device
    prefixes = prefixes_of(columns)
    if prefixes is None or not pays(prefixes.tokens, micro.tokens):
        return None
    width_r = columns["responses"].shape[1]
    attention_bl = columns["attention_mask"].bool()
    sampled_br = columns["response_mask"] & attention_bl[:, -width_r:]
    rows_bk, is_token_bk = _rows(prefixes)
    places = np.empty(prefixes.tokens, np.int64)
    places[rows_bk[is_token_bk]] = np.flatnonzero(attention_bl.cpu().numpy())
    places_T = _moved(places, device)
    inputs = {
        "input_ids": columns["input_ids"].flatten()[places_T].unsqueeze(0),
        "position_ids": columns["position_ids"].flatten()[places_T].unsqueeze(0),
        # One of four dimensions is left alone by transformers.
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device),
        "packed_layout": (_varlen_layout if varlen else _block_layout)(prefixes, rows_bk, device),
    }
    # A token was sampled after the one that is one place before it in its row.
    before_br = (attention_bl.cumsum(-1)[:, -width_r:] - 2).clamp(min=0)
    predicting_n = _moved(rows_bk, device).gather(1, before_br)[sampled_br]
    experts = columns[EXPERTS].flatten(0, 1)[places_T].unsqueeze(0) if EXPERTS in columns else None
    labels_n = columns["responses"][sampled_br]
    return ForwardPass(inputs, predicting_n, sampled_br, labels_n, packed=places_T, experts=experts)


def _rows(prefixes: Prefixes) -> tuple[Array, Array]:
    """Indices [b, k] of each row's tokens in the packed sequence, and which of them there are."""
    rows_bk = np.zeros((len(prefixes.rows), max(prefixes.lengths)), np.int64)
    lengths_b = np.empty(len(prefixes.rows), np.int64)
    start, before = 0, 0
    for row, length, shared in prefixes:
        rows_bk[row, :shared] = rows_bk[before, :shared]
        rows_bk[row, shared:length] = np.arange(start, start + length - shared)
        start, before, lengths_b[row] = start + length - shared, row, length
    return rows_bk, np.arange(rows_bk.shape[1]) < lengths_b[:, None]


def _varlen_layout(prefixes: Prefixes, rows_bk: Array, device: torch.device) -> VarlenLayout:
    rows, lengths, shared = zip(*_owners(prefixes), strict=True)
    own = np.subtract(lengths, shared)
    own_starts, row_starts = (_moved(np.cumsum([0, *each], dtype=np.int32), device) for each in (own, lengths))
    tokens = np.concatenate([rows_bk[row, :length] for row, length in zip(rows, lengths, strict=True)])
    return VarlenLayout(own_starts, row_starts, (int(own.max()), max(lengths)), _moved(tokens, device))


def _block_layout(prefixes: Prefixes, rows_bk: Array, device: torch.device) -> BlockLayout:
    blocks, slots_T, results = [], np.empty(prefixes.tokens, np.int64), 0
    for rows in _similar(prefixes):
        row_m, length_m, shared_m = np.array(rows).T
        keys, own_q = rows_bk[row_m, : length_m.max()], np.arange((length_m - shared_m).max())
        queries = np.take_along_axis(keys, np.minimum(shared_m[:, None] + own_q, keys.shape[1] - 1), 1)
        is_own = own_q < (length_m - shared_m)[:, None]
        slots_T[queries[is_own]] = results + np.flatnonzero(is_own)
        results += queries.size
        seen = None
        if shared_m.any():
            last_m = _moved(np.unique(shared_m) if len(set(shared_m)) == 1 else shared_m, device)
            last = last_m.view(-1, 1, 1, 1) + torch.arange(len(own_q), device=device).view(1, 1, -1, 1)
            seen = torch.arange(keys.shape[1], device=device) <= last
        blocks.append(Block(_moved(queries, device), _moved(keys, device), seen))
    return BlockLayout(blocks, _moved(slots_T, device))


def _similar(prefixes: Prefixes) -> list[list[tuple[int, int, int]]]:
    """The rows that add tokens, by block; those that share nothing, and need no mask, are apart."""
    blocks: list[list[tuple[int, int, int]]] = []
    for row in sorted(_owners(prefixes), key=lambda row: (row[2] == 0, row[1] - row[2], row[1]), reverse=True):
        if not blocks or (blocks[-1][0][2] == 0) != (row[2] == 0) or _padding([*blocks[-1], row]) > CALL:
            blocks.append([])
        blocks[-1].append(row)
    return blocks


def _padding(rows: list[tuple[int, int, int]]) -> int:
    """Pairs of query and key that a block has in addition to those of its rows."""
    _, length_m, shared_m = np.array(rows).T
    own_m = length_m - shared_m
    return int(len(rows) * own_m.max() * length_m.max() - (own_m * length_m).sum())


def _owners(prefixes: Prefixes) -> list[tuple[int, int, int]]:
    """The rows that add tokens, in the order in which these are packed."""
    return [(row, length, shared) for row, length, shared in prefixes if length > shared]


def _moved(array: Array, device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)


def look_up(table: Tensor, index: Tensor) -> Tensor:
    """``table[index]`` along the first dimension, by a lookup whose gradient is quick on a CPU, too."""
    return functional.embedding(index, table)
