"""How a server is launched: its arguments, its environment, its port, and the folder that it serves."""

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl_core.api.engine import EngineContext
from agentrl_core.api.errors import EngineError
from agentrl_core.engine_kit.memory_files import MemoryFolder
from agentrl_core.engine_kit.requests import read_model_config
from agentrl_engine_sglang.adapters import adapter_arguments
from agentrl_engine_sglang.config import SGLangConfig
from agentrl_engine_sglang.hooks import RESERVED_VARIABLE

CONTEXT_MARGIN = 16
"""SGLang keeps a few tokens of its context to itself; without a margin it shortens the longest answers in silence."""

STATIC_SHARE = 0.85
"""Weights and KV cache among what a server holds, about as SGLang's own defaults have it."""

KEY_FILE = "agentrl-server.yaml"
"""Read by the server as it starts."""

NOT_SERVED = {"config.json", "generation_config.json"}


def server_arguments(config: SGLangConfig, context: EngineContext, model: str, port: int) -> dict[str, Any]:
    """Arguments of ``sglang.launch_server`` by name; ``config.server_args`` has the last word.

    Raises:
        EngineError: SGLang cannot return the experts of tokens like that.
    """
    length = context.max_model_len + CONTEXT_MARGIN
    requests = config.max_running_requests or (64 if on_cpu(context) else 256)
    arguments: dict[str, Any] = {
        "model_path": model,
        "host": "127.0.0.1",
        "port": port,
        "dtype": context.dtype,
        "context_length": length,
        "tp_size": context.tensor_parallel,
        "pp_size": context.pipeline_parallel,
        "dp_size": context.data_parallel,
        "max_running_requests": requests,
        "random_seed": context.seed + context.replica,
        "weight_version": "0",
        "skip_tokenizer_init": True,
        "log_level_http": "warning",
        **adapter_arguments(context),
    }
    if context.nodes > 1:
        arguments |= {
            "nnodes": context.nodes,
            "node_rank": context.node_rank,
            "dist_init_addr": context.rendezvous,
        }
    # Of the memory that is free, and without activations and CUDA graphs.
    share = STATIC_SHARE * context.memory_share / context.memory_free
    if context.max_images:
        arguments |= {"enable_multimodal": True, "limit_mm_data_per_request": {"image": context.max_images}}
    if context.routed_experts:
        if context.pipeline_parallel > 1:
            raise EngineError(
                f"actor.router_replay: SGLang does not return the experts of all layers with pipeline_parallel="
                f"{context.pipeline_parallel}; set it to 1"
            )
        arguments["enable_return_routed_experts"] = True
    if fraction := config.mem_fraction or math.floor(1000 * share) / 1000:
        arguments["mem_fraction_static"] = fraction
    if config.max_total_tokens:
        arguments["max_total_tokens"] = config.max_total_tokens
    if on_cpu(context):
        arguments["device"] = "cpu"
        if context.adapters is not None:
            # The others are kernels for GPUs.
            arguments["lora_backend"] = "torch_native"
        # Its idle loop would hold a core that the trainer computes with.
        arguments["sleep_on_idle"] = True
        # SGLang would take most of the machine's memory, which other processes need.
        arguments.setdefault("max_total_tokens", requests * length)
    else:
        arguments["enable_memory_saver"] = True
        # Nobody sends the weights below adapters again.
        arguments["enable_weights_cpu_backup"] = config.keep_weights_asleep or context.adapters is not None
        arguments["enable_deterministic_inference"] = config.deterministic_inference
    return arguments | config.server_args


def command_line(arguments: Mapping[str, Any], folder: Path) -> list[str]:
    """``python -m sglang.launch_server`` of this interpreter.

    The API key goes into a file in ``folder`` that only this user can read: command lines are visible to everybody. It
    stays on the command line where ``server_args`` names a ``config`` already, because SGLang reads only one.
    """
    arguments = dict(arguments)
    if "config" not in arguments:
        arguments["config"] = file = folder / KEY_FILE
        file.unlink(missing_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
            json.dump({"api-key": str(arguments.pop("api_key"))}, out)
    return [sys.executable, "-m", "sglang.launch_server", *_flags(arguments)]


def _flags(arguments: Mapping[str, Any]) -> Iterator[str]:
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            if value:
                yield flag
        elif isinstance(value, list | tuple):
            yield from (flag, *map(str, value))
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            # A value that begins with a dash would be taken for a flag.
            yield from [f"{flag}={text}"] if text.startswith("-") else [flag, text]


def server_environment(config: SGLangConfig, context: EngineContext) -> dict[str, str]:
    """The environment of the server process: this one's, what SGLang needs, and ``config.env`` over both."""
    environment = dict(os.environ)
    environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"  # for the margin
    environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"  # which cannot pass while generation is paused
    environment["SGLANG_MM_AVOID_RETOKENIZE"] = "1"  # else ids of a prompt with images would be those of its text
    environment[RESERVED_VARIABLE] = ",".join(map(str, context.reserved_ids))
    environment.setdefault("HF_HUB_OFFLINE", "1")
    if on_cpu(context):
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return environment | config.env


def on_cpu(context: EngineContext) -> bool:
    """The engine computes on the CPU."""
    return context.device.startswith("cpu")


def served_folder(model_path: str) -> MemoryFolder:
    """A folder of links to the model whose configuration names no end-of-sequence token.

    SGLang ends a request at the model's own end-of-sequence tokens, unless ``ignore_eos`` is set, which also switches
    off ``stop_token_ids``. Without them a request ends where it says, and nowhere else.
    """
    config = read_model_config(model_path) | {"eos_token_id": None}
    folder = MemoryFolder("sglang-model")
    for source in Path(model_path).resolve().iterdir():
        if source.name not in NOT_SERVED:
            (folder.path / source.name).symlink_to(source)
    (folder.path / "config.json").write_text(json.dumps(config))
    return folder
