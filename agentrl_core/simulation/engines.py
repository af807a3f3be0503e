"""What inference engines take on a GPU: weights, and the KV cache of the requests in flight."""

from dataclasses import dataclass
from typing import Any

from agentrl_core.config import ResolvedConfig

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_REQUESTS = 256
"""Requests that an engine runs at once where nothing limits them."""


@dataclass(frozen=True)
class EngineShare:
    """Engines on one GPU.

    Args:
        weights: bytes, 0 where the engine generates with the actor's own module.
        kv_per_token: bytes of a token's keys and values on this GPU.
        in_flight: requests at once, on this GPU's replicas.
        request_tokens: of the longest request.
        while_training: bytes that engines keep while the trainer computes; None: weights, and the whole cache.
    """

    weights: int
    kv_per_token: int
    in_flight: int
    request_tokens: int
    while_training: int | None

    @property
    def kv_cache(self) -> int:
        """Bytes for all requests in flight at their full length."""
        return self.in_flight * self.request

    @property
    def request(self) -> int:
        """Bytes of the KV cache of one request at its full length."""
        return self.kv_per_token * self.request_tokens


def engine_share(config: ResolvedConfig, text: Any, parameters: int) -> EngineShare | None:
    """The engines that share a training process's GPU; None where they have their own.

    Args:
        text: the model's text config.
        parameters: of the model.
    """
    engine = config.rollout.engine
    if engine.placement == "standalone":
        return None
    dtype = getattr(engine, "dtype", None) or config.model.compute_dtype or "bfloat16"
    size = _BYTES.get(str(dtype), 2)
    per_gpu = max(config.engine_replicas * engine.devices // config.cluster.processes, 1)
    split = engine.tensor_parallel * engine.pipeline_parallel
    # A model without attention has no keys; devices that are more than the heads of keys hold copies of them.
    queries = getattr(text, "num_attention_heads", None) or 0
    heads = -(-(getattr(text, "num_key_value_heads", None) or queries) // engine.tensor_parallel) if queries else 0
    head = getattr(text, "head_dim", None) or text.hidden_size // max(queries, 1)
    limits = [engine.max_in_flight, getattr(engine.config, "max_num_seqs", None), _REQUESTS]
    rows = -(-config.data.batch_size * config.rollout.n // config.engine_replicas)
    in_flight = min(each for each in (*limits, rows) if each)
    own = config.cluster.runtime == "ray"
    return EngineShare(
        weights=per_gpu * parameters * size // split if own else 0,
        kv_per_token=2 * text.num_hidden_layers * heads * head * size // engine.pipeline_parallel,
        in_flight=per_gpu * in_flight,
        request_tokens=config.data.max_prompt_length + config.rollout.max_response_length,
        while_training=None if own and engine.sleep == 0 else 0,
    )
