"""Forward and backward passes over micro-batches, in Megatron-Core's schedule of the pipeline.

Shapes: b rows, p prompt, r response and l = p + r tokens of a micro-batch; s tokens of its longest row; n of its tokens
that were sampled; H hidden size.
"""

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

from agentrl_backend_megatron.log_probs import token_log_probs
from agentrl_backend_megatron.model import HiddenStates
from agentrl_core.api.errors import WorkerError
from agentrl_core.api.training_backend import Loss, MicroBatch, Outputs, Wanted


@dataclass(frozen=True)
class Rows:
    """A micro-batch with the padding at the end alone, where causal attention does not see it.

    Args:
        input_ids: [b, s]; position i of a row is its i-th token.
        predicting: [n], places in [b, s], flat, of the tokens before those that were sampled.
        labels: [n], the sampled ones.
        places: [b, r] bool, where these are among the response tokens; n are set.
    """

    input_ids: Tensor
    predicting: Tensor
    labels: Tensor
    places: Tensor

    @classmethod
    def of(cls, micro: MicroBatch, multiple: int) -> "Rows":
        """Args:
            multiple: of which s is one.

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
        before_br = rows_bl[:, -width:] * ids_bs.shape[-1] + numbers_bl[:, -width:] - 1
        return cls(ids_bs, before_br[places_br], micro["responses"][places_br], places_br)


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
        self._multiple = self._config.tensor_model_parallel_size if self._config.sequence_parallel else 1
        self._vocabulary = vocabulary
        # Transformer Engine makes its own mask; in plain torch it is given.
        self._needs_mask = "TE" not in type(inner.decoder.layers[0].self_attention.core_attention).__name__

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
        rows = [Rows.of(micro, self._multiple) for micro in micros]
        return get_forward_backward_func()(
            forward_step_func=step, data_iterator=iter(enumerate(rows)), model=self._model,
            num_microbatches=len(micros), seq_length=rows[0].input_ids.shape[-1],
            micro_batch_size=len(rows[0].input_ids), **options,
        )  # fmt: skip

    def _states(self, rows: Rows, model: Any) -> Tensor:
        length = rows.input_ids.shape[-1]
        mask_ss = None
        if self._needs_mask:
            mask_ss = torch.ones(length, length, dtype=torch.bool, device=rows.input_ids.device).triu(1)[None, None]
        positions_bs = torch.arange(length, device=rows.input_ids.device).expand_as(rows.input_ids)
        states: Tensor = model(rows.input_ids, positions_bs, mask_ss)
        return states

    def _outputs(self, states_sbH: Tensor, rows: Rows, wanted: Wanted) -> Outputs:
        if self._config.sequence_parallel:
            # Each rank's gradient is that of its part of the vocabulary; going back, they are added up.
            states_sbH = gather_from_sequence_parallel_region(states_sbH, tensor_parallel_output_grad=True)
        states_nH = states_sbH.transpose(0, 1).flatten(0, 1)[rows.predicting]
        if self._is_sharded and not self._config.sequence_parallel:
            # Of a contiguous tensor: Megatron-Core adds up a copy of any other, and loses it.
            states_nH = copy_to_tensor_model_parallel_region(states_nH)
        weight = self._inner.head_weight
        first = parallel_state.get_tensor_model_parallel_rank() * len(weight)
        log_probs_n, entropies_n = token_log_probs(
            states_nH, weight[: self._vocabulary - first], rows.labels, first,
            parallel_state.get_tensor_model_parallel_group(), wanted.temperature, wanted.entropies,
        )  # fmt: skip
        places = rows.places
        return Outputs(
            _scattered(log_probs_n, places), None if entropies_n is None else _scattered(entropies_n, places)
        )  # fmt: skip


def _scattered(values_n: Tensor, places_br: Tensor) -> Tensor:
    """Values [b, r] at their places, 0 elsewhere."""
    zeros_br = torch.zeros(places_br.shape, dtype=values_n.dtype, device=values_n.device)
    return zeros_br.masked_scatter(places_br, values_n)
