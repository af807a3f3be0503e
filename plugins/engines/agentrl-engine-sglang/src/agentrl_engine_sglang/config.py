"""Options of the SGLang engine."""

from dataclasses import dataclass
from typing import Any

from agentrl_core.api.config import option


@dataclass
class SGLangConfig:
    """``rollout.engine.config`` where ``rollout.engine.name`` is ``sglang``."""

    mem_fraction: float = option(
        0.0,
        help="share of the GPU's free memory for weights and KV cache; 0: what training processes on the same GPU "
        "leave, and SGLang's default on its own GPU",
        ge=0.0,
        lt=1.0,
    )
    max_running_requests: int = option(
        0, help="most requests in the running batch; 0: 256 on a GPU, 64 on a CPU", unit="requests", ge=0
    )
    max_total_tokens: int = option(
        0,
        help="tokens in the KV cache; 0 leaves it to SGLang on a GPU, on a CPU: max_running_requests full contexts",
        unit="tokens",
        ge=0,
    )
    keep_weights_asleep: bool = option(
        True, help="sleep level 2 moves the weights to the host's memory; otherwise they are gone until an update"
    )
    deterministic_inference: bool = option(
        False, help="SGLang's deterministic mode, which honours the seed of a request; GPU only"
    )
    port: int = option(0, help="first port to try; 0 takes any free one", ge=0, le=65535)
    start_timeout: float = option(600.0, help="until the server must be ready", unit="seconds", gt=0.0)
    update_timeout: float = option(600.0, help="for one weight update, sleep or wake-up", unit="seconds", gt=0.0)
    log_file: str = option("", help="the server's output, appended; empty: a temporary file", path=True)
    server_args: dict[str, Any] = option(
        default_factory=dict,
        help="more arguments of sglang.launch_server, e.g. {attention_backend: triton}; true is a bare flag, false "
        "leaves an argument out",
    )
    env: dict[str, str] = option(default_factory=dict, help="more environment variables of the server process")
