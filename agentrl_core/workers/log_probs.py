"""Log-probabilities and entropies of response tokens under a causal language model.

Shapes: b rows, r response tokens and l = p + r tokens of a micro-batch, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from agentrl_core.algorithms.token_log_probs import Entropies, token_log_probs
from agentrl_core.api.errors import ProtocolError, WorkerError
from agentrl_core.protocol import DataProto
from agentrl_core.workers.micro_batching import MicroBatch


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
        **micro.model_inputs,
        logits_to_keep=predicting_r,
        use_cache=False,
    ).logits
    if logits_brV.shape[1] != width_r:
        raise WorkerError(
            f"{type(model).__name__} returned logits for {logits_brV.shape[1]} positions instead of {width_r}: its "
            "forward() must take logits_to_keep as a tensor of positions, as the models of transformers do"
        )
    results = token_log_probs(logits_brV.flatten(0, 1), micro["responses"].flatten(), temperature, entropies)
    return tuple(result_n.view(micro["responses"].shape) for result_n in results)
