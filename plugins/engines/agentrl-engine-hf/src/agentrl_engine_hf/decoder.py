"""The forward of one decode step, recorded once and replayed without Python.

Shapes: B rows, H heads of queries, K heads of keys and values, L tokens attended to, D size of a head, V vocabulary.
"""

import logging
import warnings
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import nullcontext
from functools import partial
from operator import is_not
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AttentionInterface, Cache

from agentrl_engine_hf.kv_cache import LayerShape
from agentrl_engine_hf.lora import Lora, Mix

logger = logging.getLogger(__name__)

_GROUPED = "agentrl_grouped"
_OURS = ("torch.", "transformers.")
_PEFT = "peft."
_TORCH = str(Path(torch.__file__).parent)

Inputs = tuple[Any, ...]
"""Ids ``[B, 1]``, positions ``[B, 1]``, additive mask ``[B, 1, 1, L]``, rows ``[B]`` (0 to B - 1) and the places in
them ``[B]`` that the step writes, keys and values of each layer ``[B, K, L, D]``; then what a :data:`Mix` has, where
rows have adapters. Behind images the positions are others than the places."""


_PLAIN = 7
"""So many inputs a step has without adapters."""


class WindowCache(Cache):  # type: ignore[misc]  # transformers has no complete types
    """Keys and values as views of the rows that decode; each step adds one token to each row."""

    def __init__(self, rows_B: torch.Tensor, places_B: torch.Tensor, keys: list[torch.Tensor],
                 values: list[torch.Tensor]) -> None:  # fmt: skip
        super().__init__(layers=[])
        self._rows_B = rows_B
        self._places_B = places_B
        self._keys = keys
        self._values = values

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object,
               **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys[self._rows_B, :, self._places_B] = key_states.squeeze(2).to(keys.dtype)
        values[self._rows_B, :, self._places_B] = value_states.squeeze(2).to(values.dtype)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(self._keys[0].shape[2])


class Decoder(torch.nn.Module):
    """One token for every row: ``forward`` calls the module, ``replay`` runs what was recorded of it where it may.

    A record holds the module's operations, not its Python: it is used only while the module has no hooks, and only for
    modules that are made of torch's and transformers' own parts, and PEFT's where ``lora`` says what those do (an
    adapter can be switched off in Python).
    """

    def __init__(self, module: Any, lora: Lora | None = None) -> None:
        super().__init__()
        self.module = module
        self._lora = lora
        # Without adapters, and with those of a batch.
        self._records: dict[bool, Any] = {}
        self._weights: list[torch.Tensor] = []
        self._hooks: list[Any] = []
        self._recorded: list[Any] = []

    @property
    def outdated(self) -> bool:
        """Whether the module has other parts or parameters than when it was recorded."""
        parts = [*self.module.modules(), *self.module.parameters()]
        return len(parts) != len(self._recorded) or any(map(is_not, parts, self._recorded))

    def forward(self, ids_B1: torch.Tensor, positions_B1: torch.Tensor, mask: torch.Tensor, rows_B: torch.Tensor,
                places_B: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor],
                *mix: Any) -> torch.Tensor:  # fmt: skip
        with nullcontext() if self._lora is None else self._lora.using(cast("Mix | tuple[()]", mix)):
            output = self.module(
                input_ids=ids_B1,
                position_ids=positions_B1,
                attention_mask=mask,
                past_key_values=WindowCache(rows_B, places_B, keys, values),
                use_cache=True,
                logits_to_keep=1,
            )
        logits_BV: torch.Tensor = output.logits[:, -1]
        return logits_BV

    def replay(self, inputs: Inputs) -> torch.Tensor:
        """Logits ``[B, V]``."""
        record = self._records.get(len(inputs) > _PLAIN)
        if record is None or any(self._hooks):
            return self.forward(*inputs)
        # Unoptimised, the same operations run in the same order; the optimiser would compile anew for each shape.
        with torch.jit.optimized_execution(False):
            logits_BV: torch.Tensor = record(*inputs, self._weights)
            return logits_BV

    def record(self, layers: SequenceOf[LayerShape], dtype: torch.dtype, device: torch.device) -> None:
        """Record the forward, and keep the record if it repeats the module at other shapes."""
        self._records.clear()
        parts = list(self.module.modules())
        self._recorded = [*parts, *self.module.parameters()]
        self._weights = [*self.module.parameters(), *self.module.buffers()]
        self._hooks = [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        known = _OURS if self._lora is None else (*_OURS, _PEFT)
        if any(self._hooks) or not all(type(part).__module__.startswith(known) for part in parts):
            return
        for lora in (None,) if self._lora is None else (None, self._lora):
            example = partial(_example, layers=layers, dtype=dtype, device=device, lora=lora)
            try:
                record = self._trace(example(3, 24))
                for rows, length in ((1, 16), (5, 40)):
                    self._compare(record, example(rows, length), example(rows, length))
            except Exception as error:  # noqa: BLE001 - whatever cannot be recorded runs as before
                logger.info("decoding runs without a recorded forward: %s", error)
                return
            self._records[lora is not None] = record

    def _trace(self, inputs: Inputs) -> Any:
        config = self.module.config.get_text_config(decoder=True)
        attention = config._attn_implementation
        AttentionInterface.register(_GROUPED, _grouped_attention)
        try:
            if attention == "sdpa":
                config._attn_implementation = _GROUPED
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                # torch.jit.trace would register a class for every module, which torch keeps until the process ends.
                graph, _ = torch._C._create_graph_by_tracing(
                    lambda *inputs: self.forward(*inputs[:-1]), (*inputs, self._weights), lambda _: "", True, False
                )
        finally:
            config._attn_implementation = attention
        # What depends on data or on a shape in Python is frozen in the record; torch's own functions only check shapes.
        for warning in caught:
            if issubclass(warning.category, torch.jit.TracerWarning) and not warning.filename.startswith(_TORCH):
                raise ValueError(str(warning.message))
        _simplify(graph)
        return torch._C._create_function_from_graph("forward", graph)

    def _compare(self, record: Any, inputs: Inputs, expected_inputs: Inputs) -> None:
        expected = [self.forward(*expected_inputs), *_stores(expected_inputs)]
        with torch.jit.optimized_execution(False):
            found = [record(*inputs, self._weights), *_stores(inputs)]
        for left, right in zip(expected, found, strict=True):
            gap = (left - right).abs().max()
            if not gap <= left.abs().max() * torch.finfo(left.dtype).eps ** 0.5:
                raise ValueError(f"the record differs from the module by {float(gap):.3g} at {list(inputs[2].shape)}")


def _simplify(graph: Any) -> None:
    """Leave out what is computed twice, mostly sizes: a fifth of the operations, which cost more than their results."""
    torch._C._jit_pass_inline(graph)
    # The record knows the sizes of its example; folded into it they would be constants.
    torch._C._jit_pass_erase_shape_information(graph)
    for simplify in (torch._C._jit_pass_peephole, torch._C._jit_pass_cse, torch._C._jit_pass_dce):
        simplify(graph)


def _stores(inputs: Inputs) -> Iterator[torch.Tensor]:
    yield from inputs[5]
    yield from inputs[6]


def _grouped_attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                       attention_mask: torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None,
                       **kwargs: object) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention of one new token: the heads of a group are queries of one head, so that keys need not be repeated."""
    query_BKGD = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])
    output_BKGD = torch.nn.functional.scaled_dot_product_attention(
        query_BKGD, key, value, attn_mask=attention_mask, scale=scaling
    )
    return output_BKGD.reshape(query.shape[0], 1, query.shape[1], -1), None


def _example(rows: int, length: int, layers: SequenceOf[LayerShape], dtype: torch.dtype, device: torch.device,
             lora: Lora | None) -> Inputs:  # fmt: skip
    """Inputs of a step that has seen something: the same for the same shape."""
    positions_B1 = (torch.arange(rows, device=device).unsqueeze(1) * 5 + 3) % length
    hidden = torch.arange(length, device=device) > positions_B1[:, None, :, None]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, torch.finfo(dtype).min)
    ids_B1 = torch.arange(rows, device=device).unsqueeze(1)

    def waves(heads: int, dim: int, shift: int) -> torch.Tensor:
        count = rows * heads * length * dim
        return torch.sin(torch.arange(count, device=device) * 0.7 + shift).to(dtype).view(rows, heads, length, dim)

    keys = [waves(shape.heads, shape.key_dim, layer) for layer, shape in enumerate(layers)]
    values = [waves(shape.heads, shape.value_dim, -layer) for layer, shape in enumerate(layers)]
    mix = () if lora is None else lora.example(rows)
    rows_B = torch.arange(rows, device=device)
    return ids_B1, positions_B1, mask, rows_B, positions_B1.squeeze(1).clone(), keys, values, *mix
