"""Log-probabilities and entropies of response tokens under a causal language model.

Shapes: b rows, r response tokens and l = p + r tokens of a micro-batch, n of its response tokens, V vocabulary.
"""

from typing import Any

from torch import Tensor

from agentrl_core.algorithms.token_log_probs import Entropies, token_log_probs
from agentrl_core.api.errors import ProtocolError, WorkerError
from agentrl_core.protocol import DataProto
from agentrl_core.workers.micro_batching import MicroBatch, in_place
from agentrl_core.workers.packed_attention import ForwardPass


def temperature_of(batch: DataProto, method: str) -> float:
    """``meta_info["temperature"]`` of the rollout; greedy decoding (0) reports log-probabilities at temperature 1."""
    if "temperature" not in batch.meta_info:
        raise ProtocolError(f"{method} needs meta_info['temperature'], that of the rollout; the batch has none")
    return float(batch.meta_info["temperature"]) or 1.0


def response_logits(model: Any, micro: MicroBatch) -> tuple[Tensor, Tensor]:
    """Logits [n, V] that predict response tokens, and the places [b, r] of these n tokens, in the order of rows.

    All of them where the model computes padded rows, those that were sampled where it packs.

    Raises WorkerError for a model that does not know ``logits_to_keep``.
    """
    rows = ForwardPass.of(model, micro)
    logits = model(**rows.inputs, logits_to_keep=rows.predicting, use_cache=False).logits
    if logits.shape[1] != len(rows.predicting):
        raise WorkerError(
            f"{type(model).__name__} returned logits for {logits.shape[1]} positions, not {len(rows.predicting)}: its "
            "forward() must take logits_to_keep as a tensor of positions, as the models of transformers do"
        )
    return logits.flatten(0, 1), rows.places


def response_log_probs(
    model: Any, micro: MicroBatch, temperature: float, entropies: Entropies = "none"
) -> tuple[Tensor, ...]:
    """Log-probabilities [b, r] of the response tokens, float32, and unless ``none`` the entropies [b, r].

    They are those of softmax(logits / temperature). Logits are computed only for positions that predict a response
    token; where rows are packed only for those that predict a sampled one, and the results of others are 0.
    Log-probabilities carry a gradient wherever gradients are enabled, entropies as ``entropies`` says.

    Raises WorkerError for a model that does not know ``logits_to_keep``.
    """
    logits_nV, places_br = response_logits(model, micro)
    results = token_log_probs(logits_nV, micro["responses"][places_br], temperature, entropies)
    return tuple(in_place(result_n, places_br) for result_n in results)
