"""Options of the vLLM engine."""

from dataclasses import dataclass
from typing import Any

from agentrl_core.api.config import option


@dataclass
class VLLMConfig:
    """``rollout.engine.config`` where ``rollout.engine.name`` is ``vllm``."""

    mem_fraction: float = option(
        0.0,
        help="share of the GPU's memory for weights and KV cache; 0: what training processes on the same GPU leave, "
        "and vLLM's default on its own GPU",
        ge=0.0,
        lt=1.0,
    )
    max_num_seqs: int = option(
        0, help="most requests in the running batch; 0: 256 on a GPU, 64 on a CPU", unit="requests", ge=0
    )
    kv_cache_gib: float = option(
        0.0,
        help="size of the KV cache; 0 leaves it to vLLM on a GPU, on a CPU: max_num_seqs full contexts",
        unit="GiB",
        ge=0.0,
    )
    enforce_eager: bool = option(False, help="no CUDA graphs and no compilation; on a CPU there never are any")
    prefix_caching: bool = option(True, help="keep the KV cache of prompts that may come again")
    engine_args: dict[str, Any] = option(
        default_factory=dict, help="more arguments of vllm.AsyncEngineArgs, e.g. {block_size: 16}"
    )
    env: dict[str, str] = option(default_factory=dict, help="more environment variables of vLLM's processes")
