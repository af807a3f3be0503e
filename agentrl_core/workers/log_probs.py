"""Log-probabilities and entropies of response tokens under a causal language model.

Shapes: b rows, p prompt and r response tokens of a micro-batch; n tokens of a micro-batch,
c of a chunk, V vocabulary.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from agentrl_core.algorithms.entropy import entropy
from agentrl_core.api.errors import ProtocolError, WorkerError
from agentrl_core.protocol import DataProto
from agentrl_core.workers.micro_batching import MicroBatch

Entropies = Literal["none", "value", "gradient"]

CHUNK_ELEMENTS = 2**26
"""Logits that are worked on at a time, in float32: 256 MiB, where a micro-batch's may be tens of GiB."""


def temperature_of(batch: DataProto, method: str) -> float:
    """``meta_info["temperature"]`` of the rollout; greedy decoding (0) reports log-probabilities at temperature 1."""
    if "temperature" not in batch.meta_info:
        raise ProtocolError(f"{method} needs meta_info['temperature'], that of the rollout; the batch has none")
    return float(batch.meta_info["temperature"]) or 1.0


def response_log_probs(
    model: Any, micro: MicroBatch, temperature: float, entropies: Entropies = "none"
) -> tuple[Tensor, ...]:
    """Log-probabilities [b, r] of the response tokens, float32, and unless ``none`` the entropies [b, r].

    They are those of softmax(logits / temperature). Logits are computed only for the r positions that predict a
    response token. Log-probabilities carry a gradient wherever gradients are enabled, entropies as ``entropies`` says.

    Raises WorkerError for a model that does not know ``logits_to_keep``.
    """
    width_r = micro["responses"].shape[1]
    width_l = micro["input_ids"].shape[1]
    predicting_r = torch.arange(width_l - width_r - 1, width_l - 1, device=micro["input_ids"].device)
    logits_brV = model(
        input_ids=micro["input_ids"],
        attention_mask=micro["attention_mask"],
        position_ids=micro["position_ids"],
        logits_to_keep=predicting_r,
        use_cache=False,
    ).logits
    if logits_brV.shape[1] != width_r:
        raise WorkerError(
            f"{type(model).__name__} returned logits for {logits_brV.shape[1]} positions instead of {width_r}: its "
            "forward() must take logits_to_keep as a tensor of positions, as the models of transformers do"
        )
    results = _in_chunks(logits_brV.flatten(0, 1), micro["responses"].flatten(), temperature, entropies)
    return tuple(result_n.view(micro["responses"].shape) for result_n in results)


def _in_chunks(logits_nV: Tensor, labels_n: Tensor, temperature: float, entropies: Entropies) -> tuple[Tensor, ...]:
    size = max(CHUNK_ELEMENTS // logits_nV.shape[-1], 1)
    if len(labels_n) <= size:
        return _chunk(logits_nV, labels_n, temperature, entropies)
    # Chunks are recomputed in the backward pass, so that their float32 copies do not outlive them.
    parts = [
        checkpoint(_chunk, logits_cV, labels_c, temperature, entropies, use_reentrant=False)
        for logits_cV, labels_c in zip(torch.split(logits_nV, size), torch.split(labels_n, size), strict=True)
    ]
    return tuple(torch.cat(results) for results in zip(*parts, strict=True))


def _chunk(logits_nV: Tensor, labels_n: Tensor, temperature: float, entropies: Entropies) -> tuple[Tensor, ...]:
    scaled_nV = logits_nV.float()
    if temperature != 1.0:
        scaled_nV = scaled_nV / temperature
    log_normaliser_n = scaled_nV.logsumexp(-1)
    log_probs_n = scaled_nV.gather(-1, labels_n.unsqueeze(-1)).squeeze(-1) - log_normaliser_n
    if entropies == "none":
        return (log_probs_n,)
    if entropies == "value":
        scaled_nV, log_normaliser_n = scaled_nV.detach(), log_normaliser_n.detach()
    return log_probs_n, entropy(scaled_nV, log_normaliser_n)
