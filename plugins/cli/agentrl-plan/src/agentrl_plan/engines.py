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
        request: bytes of the cache of the longest request on this GPU: see :func:`request_bytes`.
        in_flight: requests at once, on this GPU's replicas.
        while_training: bytes that engines keep while the trainer computes; None: weights, and the whole cache.
    """

    weights: int
    request: int
    in_flight: int
    while_training: int | None

    @property
    def kv_cache(self) -> int:
        """Bytes for all requests in flight at their full length."""
        return self.in_flight * self.request


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
    tokens = config.data.max_prompt_length + config.rollout.max_response_length
    limits = [engine.max_in_flight, getattr(engine.config, "max_num_seqs", None), _REQUESTS]
    rows = -(-config.data.batch_size * config.rollout.n // config.engine_replicas)
    in_flight = min(each for each in (*limits, rows) if each)
    own = config.cluster.runtime == "ray"
    return EngineShare(
        weights=per_gpu * parameters * size // split if own else 0,
        request=request_bytes(text, tokens, size, engine.tensor_parallel) // engine.pipeline_parallel,
        in_flight=per_gpu * in_flight,
        while_training=None if own and engine.sleep == 0 else 0,
    )


def request_bytes(text: Any, tokens: int, size: int, devices: int = 1) -> int:
    """Cache of a request on one device, layer by layer.

    - Full attention keeps keys and values of all tokens. Devices that are more than the heads of keys hold copies.
    - Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) keeps one latent vector of
      ``kv_lora_rank`` numbers and the rotated key of ``qk_rope_head_dim`` of each token, on every device.
    - Sliding windows and chunks keep the tokens of one window.
    - Linear attention keeps a matrix of each head, in float32, and the inputs of its convolution, however long the
      request is (Gated DeltaNet, arXiv 2412.06464, equation 10); convolutions keep their inputs only. Recurrent layers
      with other names in their config count as full attention, which is too much.

    Layers are those that transformers' ``cache_utils.py`` makes of a config: ``layer_types``, else ``sliding_window``
    or ``attention_chunk_size`` of all layers; the last ``num_kv_shared_layers`` read the cache of others.

    Args:
        text: the model's text config.
        tokens: of the request.
        size: bytes of a number.
        devices: among which an engine splits each layer.
    """

    def of(name: str, default: int = 0) -> int:
        return getattr(text, name, None) or default

    # A model without attention has no keys.
    queries = of("num_attention_heads")
    heads = -(-of("num_key_value_heads", queries) // devices)
    latent = of("kv_lora_rank") + of("qk_rope_head_dim") if of("kv_lora_rank") else 0
    per_token = size * (latent or 2 * heads * of("head_dim", text.hidden_size // max(queries, 1)))
    keys, values = (of(f"linear_num_{each}_heads", of("linear_num_heads")) for each in ("key", "value"))
    key, value = (of(f"linear_{each}_head_dim", of("linear_head_dim")) for each in ("key", "value"))
    inputs = (of("linear_conv_kernel_dim", 1) - 1) * (2 * keys * key + values * value)
    window = {"sliding_attention": of("sliding_window"), "chunked_attention": of("attention_chunk_size")}
    bytes_of = {kind: per_token * min(tokens, longest or tokens) for kind, longest in window.items()}
    bytes_of |= {"conv": size * of("conv_L_cache") * text.hidden_size // devices, "moe": 0}
    if values:
        bytes_of["linear_attention"] = (4 * values * key * value + size * inputs) // devices
    kind = next((kind for kind, longest in window.items() if longest), "full_attention")
    kinds = getattr(text, "layer_types", None) or [kind] * text.num_hidden_layers
    kinds = kinds[: len(kinds) - of("num_kv_shared_layers")]
    return sum(bytes_of.get(each, per_token * tokens) for each in kinds)
