"""Options of the embedded engine."""

from dataclasses import dataclass

from agentrl_core.api.config import option


@dataclass
class HFEngineConfig:
    """``rollout.engine.config`` where ``rollout.engine.name`` is ``hf``."""

    max_num_seqs: int = option(256, help="most requests in the running batch", unit="requests", ge=1)
    kv_cache_tokens: int = option(
        0,
        help="most tokens in the KV cache, counted as rows x the longest row; 0 means max_num_seqs x max_model_len",
        unit="tokens",
        ge=0,
    )
    max_prefill_tokens: int = option(
        16384, help="most prompt tokens, padding included, computed between two decode steps", unit="tokens", ge=1
    )
    attn_implementation: str = option(
        "sdpa", help="attention of a model that the engine loads itself", choices=("sdpa", "eager")
    )
    cpu_threads: int = option(
        0,
        help="CPU threads that the engine computes with; 0 means one for a model below 32 M parameters, whose decode "
        "step is too short to be shared, and those of the process for others",
        ge=0,
    )
    record_decode: bool = option(
        True, help="record the forward of a decode step and replay it without Python, where that repeats the module"
    )
