"""Forward and backward passes over micro-batches, in Megatron-Core's schedule of the pipeline.

Shapes: b rows, p prompt, r response and l = p + r tokens of a micro-batch; s tokens of its longest row, c of the part
of a row that this rank has; n tokens that were sampled, m those of them that this rank predicts; H hidden size.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from agentrl_backend_megatron.context import gathered, own_positions
from agentrl_backend_megatron.log_probs import token_log_probs
from agentrl_backend_megatron.model import HiddenStates
from agentrl_core.api.errors import WorkerError
from agentrl_core.api.training_backend import Loss, MicroBatch, Outputs, Wanted


@dataclass(frozen=True)
class Rows:
    """A micro-batch with the padding at the end alone, where causal attention does not see it.

    Args:
        input_ids: [b, c].
        positions: [c] of these in their rows; position i of a row is its i-th token.
        predicting: [m], places in [b, c], flat, of the tokens before those that were sampled.
        labels: [m], the sampled ones.
        is_own: [n] bool, which of all that were sampled these are.
        places: [b, r] bool, where all are among the response tokens.
    """

    input_ids: Tensor
    positions: Tensor
    predicting: Tensor
    labels: Tensor
    is_own: Tensor
    places: Tensor

    @classmethod
    def of(cls, micro: MicroBatch, multiple: int, rank: int, size: int) -> "Rows":
        """Args:
            multiple: of which s is one.
            rank, size: of those that the rows are split over.

        Raises:
            WorkerError: positions do not count a row's tokens.
        """
        ids_bl, mask_bl = micro["input_ids"], micro["attention_mask"].bool()
        numbers_bl = mask_bl.cumsum(-1) - 1
        if bool((mask_bl & (micro["position_ids"] != numbers_bl)).any()):
            raise WorkerError(
                f"megatron counts the positions of each row from 0 without gaps; found others in a {micro}"
            )
        longest = int(numbers_bl.max()) + 1
        ids_bs = ids_bl.new_zeros(len(ids_bl), -(-longest // multiple) * multiple)
        rows_bl = torch.arange(len(ids_bl), device=ids_bl.device).unsqueeze(-1).expand_as(ids_bl)
        ids_bs[rows_bl[mask_bl], numbers_bl[mask_bl]] = ids_bl[mask_bl]
        width = micro["responses"].shape[-1]
        # A first token is predicted by nothing.
        places_br = micro["response_mask"].bool() & (mask_bl & (numbers_bl > 0))[:, -width:]
        own_c = own_positions(ids_bs.shape[-1], rank, size, ids_bs.device)
        numbers_s = torch.full_like(ids_bs[0], -1)
        numbers_s[own_c] = torch.arange(len(own_c), device=own_c.device)
        before_n = numbers_s[numbers_bl[:, -width:][places_br] - 1]
        is_own_n = before_n >= 0
        predicting_n = rows_bl[:, -width:][places_br] * len(own_c) + before_n
        labels_n = micro["responses"][places_br]
        return cls(ids_bs[:, own_c], own_c, predicting_n[is_own_n], labels_n[is_own_n], is_own_n, places_br)


class Passes:
    """Args:
    model: with what adds up its gradients around it, if it is trained.
    inner: the model itself.
    vocabulary: tokens that exist.
    """

    def __init__(self, model: Any, inner: HiddenStates, vocabulary: int) -> None:
        self._model = model
        self._inner = inner
        self._config = inner.config
        self._is_sharded = self._config.tensor_model_parallel_size > 1
        self._rank, self._size = parallel_state.get_context_parallel_rank(), self._config.context_parallel_size
        self._multiple = self._config.tensor_model_parallel_size if self._config.sequence_parallel else 1
        if self._size > 1:
            self._multiple = self._size * math.lcm(2, self._multiple)
        self._vocabulary = vocabulary
        # Transformer Engine makes its own mask, as all attention over parts of rows does; in plain torch it is given.
        attention = type(inner.decoder.layers[0].self_attention.core_attention).__name__
        self._needs_mask = "TE" not in attention and self._size == 1

    def forward(self, micros: Sequence[MicroBatch], wanted: Wanted) -> list[Outputs]:
        """Of each of them; empty on ranks of other stages than the last one."""
        if not micros:
            return []

        def step(data: Any, model: Any) -> tuple[Tensor, Callable[..., Any]]:
            _, rows = next(data)
            return self._states(rows, model), lambda states, non_loss_data: self._outputs(states, rows, wanted)

        found = self._run(step, micros, forward_only=True, collect_non_loss_data=True)
        return found if parallel_state.is_pipeline_last_stage() else [Outputs()] * len(micros)

    def forward_backward(self, micros: Sequence[MicroBatch], wanted: Wanted, loss: Loss) -> None:
        """Adds gradients to those of this rank; nothing is added up over ranks."""
        if not micros:
            return

        def step(data: Any, model: Any) -> tuple[Tensor, Callable[..., Any]]:
            number, rows = next(data)

            def of(states: Tensor) -> tuple[Tensor, Tensor, None]:
                result = loss(number, self._outputs(states, rows, wanted))
                return result, torch.zeros((), dtype=torch.int, device=result.device), None

            return self._states(rows, model), of

        self._run(step, micros)

    def _run(self, step: Any, micros: Sequence[MicroBatch], **options: bool) -> Any:
        rows = [Rows.of(micro, self._multiple, self._rank, self._size) for micro in micros]
        return get_forward_backward_func()(
            forward_step_func=step, data_iterator=iter(enumerate(rows)), model=self._model,
            num_microbatches=len(micros), seq_length=len(rows[0].positions) * self._size,
            micro_batch_size=len(rows[0].input_ids), **options,
        )  # fmt: skip

    def _states(self, rows: Rows, model: Any) -> Tensor:
        length = rows.input_ids.shape[-1]
        mask_ss = None
        if self._needs_mask:
            mask_ss = torch.ones(length, length, dtype=torch.bool, device=rows.input_ids.device).triu(1)[None, None]
        states: Tensor = model(rows.input_ids, rows.positions.expand_as(rows.input_ids), mask_ss)
        return states

    def _outputs(self, states_cbH: Tensor, rows: Rows, wanted: Wanted) -> Outputs:
        if self._config.sequence_parallel:
            # Each rank's gradient is that of its part of the vocabulary; going back, they are added up.
            states_cbH = gather_from_sequence_parallel_region(states_cbH, tensor_parallel_output_grad=True)
        states_mH = states_cbH.transpose(0, 1).flatten(0, 1)[rows.predicting]
        if self._is_sharded and not self._config.sequence_parallel:
            # Of a contiguous tensor: Megatron-Core adds up a copy of any other, and loses it.
            states_mH = copy_to_tensor_model_parallel_region(states_mH)
        weight = self._inner.head_weight
        first = parallel_state.get_tensor_model_parallel_rank() * len(weight)
        log_probs_m, entropies_m = token_log_probs(
            states_mH, weight[: self._vocabulary - first], rows.labels, first,
            parallel_state.get_tensor_model_parallel_group(), wanted.temperature, wanted.entropies,
        )  # fmt: skip
        return Outputs(
            self._scattered(log_probs_m, rows), None if entropies_m is None else self._scattered(entropies_m, rows)
        )  # fmt: skip

    def _scattered(self, values_m: Tensor, rows: Rows) -> Tensor:
        """Values [b, r] of all ranks at their places, 0 elsewhere."""
        values_n = values_m
        if self._size > 1:
            values_n = gathered(values_m, rows.is_own, parallel_state.get_context_parallel_group())
        zeros_br = torch.zeros(rows.places.shape, dtype=values_n.dtype, device=values_n.device)
        return zeros_br.masked_scatter(rows.places, values_n)
