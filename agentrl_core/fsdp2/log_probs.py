"""Log-probabilities and entropies of response tokens under a causal language model.

Shapes: b rows, r response tokens and l = p + r tokens of a micro-batch, n of its response tokens, c of a chunk of
these; H hidden size, V vocabulary.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agentrl_core.algorithms.token_log_probs import Entropies, token_log_probs
from agentrl_core.api.errors import WorkerError
from agentrl_core.api.training_backend import MicroBatch
from agentrl_core.engine_kit.routers import Routers
from agentrl_core.fsdp2.media import Media
from agentrl_core.fsdp2.models import vocabulary_of
from agentrl_core.fsdp2.packed_attention import example_rows, forward_pass, rounding
from agentrl_core.fsdp2.packing import ForwardPass
from agentrl_core.fsdp2.sharded_log_probs import sharded_log_probs
from agentrl_core.fsdp2.split import WHOLE, Split
from agentrl_core.workers.micro_batching import scattered

logger = logging.getLogger(__name__)

OfLogits = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
"""Results [c, …] of logits [c, V] and labels [c]."""

MOST_LOGITS = 2**28
"""Logits of a chunk: half a GiB in bfloat16, and as much for their gradient. Smaller chunks would save little and take
longer, for each adds a gradient as large as the whole output head."""


def response_logits(
    model: Any, micro: MicroBatch, media: Media | None = None, split: Split = WHOLE
) -> tuple[Tensor, Tensor]:
    """Logits [n, V] that predict response tokens, and the places [b, r] of these n tokens, in the order of rows.

    All of them where the model computes padded rows, those that were sampled where it packs. Of a vocabulary that is
    split over ranks those of this rank.

    Raises WorkerError for a model that does not know ``logits_to_keep``.
    """
    rows = forward_pass(model, micro, media, split)
    return rows.own(_logits(model, rows)), rows.places


def response_log_probs(
    model: Any,
    micro: MicroBatch,
    temperature: float,
    entropies: Entropies = "none",
    in_chunks: bool = False,
    media: Media | None = None,
    split: Split = WHOLE,
    routers: Routers | None = None,
) -> tuple[Tensor, ...]:
    """Log-probabilities [b, r] of the response tokens, float32, and unless ``none`` the entropies [b, r].

    They are those of softmax(logits / temperature). Logits are computed only for positions that predict a response
    token; where rows are packed only for those that predict a sampled one, and the results of others are 0.
    Log-probabilities carry a gradient wherever gradients are enabled, entropies as ``entropies`` says.

    Args:
        in_chunks: never have more than :data:`MOST_LOGITS` logits, neither here nor in the backward pass; for a model
            that :func:`chunks_logits`.
        media: of a model that is shown images.
        split: what this rank computes of them; ranks with parts of the same rows get the same results.
        routers: of the model, which get the experts of the micro-batch, until the next one.

    Raises WorkerError for a model that does not know ``logits_to_keep``.
    """
    vocabulary = split.vocabulary

    def log_probs(logits_cV: Tensor, labels_c: Tensor) -> tuple[Tensor, ...]:
        if vocabulary is not None:
            return sharded_log_probs(logits_cV, labels_c, vocabulary, temperature, entropies)
        return token_log_probs(logits_cV, labels_c, temperature, entropies)

    rows = forward_pass(model, micro, media, split)
    if routers is not None:
        routers.given = None if rows.experts is None else rows.experts.flatten(0, 1)
    labels_n = rows.labels
    width = vocabulary_of(model) if vocabulary is None else vocabulary.size
    count = -(-len(labels_n) * width // MOST_LOGITS) if in_chunks else 1
    if count > 1:
        results = _of_chunks(model, rows, labels_n, -(-len(labels_n) // count), log_probs)
    else:
        results = log_probs(_logits(model, rows), labels_n)
    return tuple(scattered(rows.own(result_n), rows.places) for result_n in results)


def chunks_logits(model: Any, most_logits: int, device: torch.device, media: Media | None = None) -> bool:
    """Whether a model with up to so many logits in a micro-batch shall compute them in chunks.

    It shall where they are more than :data:`MOST_LOGITS`, and are the same in chunks: a few rows are computed in both
    ways. All ranks must call this.
    """
    if most_logits <= MOST_LOGITS:
        return False
    micro = example_rows(model, media).to(device)
    reason = ""
    try:
        with torch.no_grad():
            rows = forward_pass(model, micro, media)
            whole_nV = _logits(model, rows)
            (cut_nV,) = _of_chunks(model, rows, rows.labels, 5, lambda logits, _: (logits,))
        gap, largest = float((whole_nV - cut_nV).abs().max()), float(whole_nV.abs().max())
        if not gap <= rounding(whole_nV, model) * largest:
            reason = f"in chunks they differ by {gap:.2g}, the largest is {largest:.2g}"
    except Exception as error:  # noqa: BLE001 - what cannot be cut is computed as a whole
        reason = str(error)
    if reason:
        logger.info("%s computes all logits of a micro-batch at once: %s", type(model).__name__, reason)
    return not reason


def _logits(model: Any, rows: ForwardPass) -> Tensor:
    logits: Tensor = model(**rows.inputs, logits_to_keep=rows.predicting, use_cache=False).logits
    if logits.shape[1] != len(rows.predicting):
        raise WorkerError(
            f"{type(model).__name__} returned logits for {logits.shape[1]} positions, not {len(rows.predicting)}: its "
            "forward() must take logits_to_keep as a tensor of positions, as the models of transformers do"
        )
    return logits.flatten(0, 1)


def _of_chunks(model: Any, rows: ForwardPass, labels_n: Tensor, size: int, function: OfLogits) -> tuple[Tensor, ...]:
    """Results [n, …] of ``function``, called with the logits of ``size`` tokens at a time.

    The model's own forward runs once for the hidden states and once for each chunk of them, so whatever it does between
    hidden states and logits is done; of what stands before them it then sees one token. All of that is one call of the
    model, so that FSDP2 gathers its parameters once and keeps them for the backward pass, in which the logits are
    computed again.
    """
    base, whole = model.get_decoder(), model.forward
    if base is model:
        raise WorkerError("its output head cannot be separated from the rest: get_decoder() returns the model itself")

    first = rows.inputs["input_ids"][:1, :1]

    def of_chunk(states_cH: Tensor, labels_c: Tensor, outputs: Any) -> tuple[Tensor, ...]:
        part = replace(outputs, last_hidden_state=states_cH.unsqueeze(0))
        with _computing(base, lambda *args, **kwargs: part):
            return function(whole(input_ids=first, use_cache=False).logits.flatten(0, 1), labels_c)

    def forward(**inputs: Any) -> tuple[Tensor, ...]:
        computed, run = [], base.forward

        def once(*args: Any, **kwargs: Any) -> Any:
            computed.append(run(*args, **kwargs))
            return computed[-1]

        with _computing(base, once):
            whole(**inputs, logits_to_keep=rows.predicting[:0])
        (outputs,) = computed
        states_nH = rows.predicting_states(outputs.last_hidden_state)
        parts = zip(torch.split(states_nH, size), torch.split(labels_n, size), strict=True)
        results = [
            checkpoint(of_chunk, *part, outputs, use_reentrant=False, preserve_rng_state=False) for part in parts
        ]
        return tuple(torch.cat(result) for result in zip(*results, strict=True))

    with _computing(model, forward):
        found: tuple[Tensor, ...] = model(**rows.inputs, use_cache=False)
    return found


@contextmanager
def _computing(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, a module computes something else, and its hooks run as always."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
