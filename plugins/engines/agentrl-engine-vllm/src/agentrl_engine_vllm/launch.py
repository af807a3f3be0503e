"""How vLLM is started: its arguments and its environment."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from agentrl_core.api.engine import EngineContext
from agentrl_core.api.errors import EngineError
from agentrl_core.api.weights import DTYPE_BYTES
from agentrl_engine_vllm.adapters import adapter_arguments
from agentrl_engine_vllm.config import VLLMConfig
from agentrl_engine_vllm.images import image_arguments

BACKEND = "agentrl"
"""Our weight transfer backend, by the name under which vLLM knows it."""
WORKER_EXTENSION = "agentrl_engine_vllm.backend.WorkerExtension"
WATCH_VARIABLE = "AGENTRL_VLLM_ENDS_WITH_PARENT"
"""Set in vLLM's processes that an engine of ours has started."""
CPU_BLOCK_SIZE = 32
"""Tokens of a block on a CPU. vLLM's own 128 never finds a short prompt in its cache."""
FALLBACK_KV_BYTES = 1 << 30


def check_installed() -> None:
    """Raises EngineError where this interpreter has no vLLM."""
    if importlib.util.find_spec("vllm") is None:
        raise EngineError(
            f"rollout.engine.python: {sys.executable} has no package vllm; choose an interpreter that has it, or "
            "install it there: pip install 'agentrl-engine-vllm[vllm]'"
        )


def on_cpu(context: EngineContext) -> bool:
    """The engine computes on the CPU."""
    return context.device.startswith("cpu")


def engine_arguments(config: VLLMConfig, context: EngineContext, model: dict[str, Any]) -> dict[str, Any]:
    """Arguments of ``AsyncEngineArgs`` by name; ``config.engine_args`` has the last word.

    Args:
        model: the model's ``config.json``.
    """
    arguments: dict[str, Any] = {
        "model": context.model_path,
        "dtype": context.dtype,
        "max_model_len": context.max_model_len,
        "seed": context.seed + context.replica,
        "tensor_parallel_size": context.tensor_parallel,
        "pipeline_parallel_size": context.pipeline_parallel,
        "data_parallel_size": context.data_parallel,
        "max_num_seqs": max_num_seqs(config, context),
        "enable_prefix_caching": config.prefix_caching,
        "enforce_eager": config.enforce_eager or on_cpu(context),
        # Only grammars of json_schema need it.
        "skip_tokenizer_init": not has_tokenizer(context.model_path),
        # Of several backends vLLM would take the one that the first request needs. This one refuses a schema that it
        # cannot enforce. With any whitespace a small model writes nothing else, up to max_tokens.
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        # The model's own sampling defaults and end of sequence are the caller's business.
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": WORKER_EXTENSION,
        "disable_log_stats": True,
    }
    if context.tensor_parallel * context.pipeline_parallel > 1:
        # Inside a Ray actor vLLM would otherwise look for GPUs of other actors.
        arguments["distributed_executor_backend"] = "mp"
    arguments |= adapter_arguments(context.adapters, context.nodes) | image_arguments(context)
    if context.routed_experts:
        _check_routed_experts(config, context)
        arguments["enable_return_routed_experts"] = True
    if context.nodes > 1:
        address, _, port = context.rendezvous.rpartition(":")
        arguments |= {
            "nnodes": context.nodes,
            "node_rank": context.node_rank,
            "master_addr": address,
            "master_port": int(port),
        }
    if fraction := config.mem_fraction or context.memory_share:
        arguments["gpu_memory_utilization"] = fraction
    if config.kv_cache_gib:
        arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gib * (1 << 30))
    if on_cpu(context):
        arguments["block_size"] = CPU_BLOCK_SIZE
        # vLLM would take a share of the machine's memory, which other processes need.
        arguments.setdefault("kv_cache_memory_bytes", kv_cache_bytes(config, context, model))
    else:
        arguments["enable_sleep_mode"] = True
    return arguments | config.engine_args


def _check_routed_experts(config: VLLMConfig, context: EngineContext) -> None:
    problem = (
        f"device={context.device}; it takes GPUs" if on_cpu(context) else
        f"pipeline_parallel={context.pipeline_parallel}; set it to 1" if context.pipeline_parallel > 1 else
        "" if config.prefix_caching else "prefix_caching=false; set it to true"
    )  # fmt: skip
    if problem:
        raise EngineError(f"actor.router_replay: vLLM does not return the experts of tokens with {problem}")


def max_num_seqs(config: VLLMConfig, context: EngineContext) -> int:
    """Most requests in the running batch."""
    return config.max_num_seqs or (64 if on_cpu(context) else 256)


def has_tokenizer(model_path: str) -> bool:
    """The model's folder has the tokenizer."""
    return (Path(model_path) / "tokenizer_config.json").exists()


def kv_cache_bytes(config: VLLMConfig, context: EngineContext, model: dict[str, Any]) -> int:
    """What ``max_num_seqs`` full contexts need; a GiB for models that do not say how large their heads are."""
    text = model.get("text_config") or model
    try:
        heads = int(text.get("num_key_value_heads") or text["num_attention_heads"])
        head_dim = int(text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"])
        per_token = 2 * int(text["num_hidden_layers"]) * heads * head_dim * DTYPE_BYTES.get(context.dtype, 4)
    except KeyError:
        return FALLBACK_KV_BYTES
    blocks = -(-context.max_model_len // CPU_BLOCK_SIZE) + 1
    return per_token * CPU_BLOCK_SIZE * blocks * (max_num_seqs(config, context) + 1)


def environment(config: VLLMConfig, context: EngineContext) -> dict[str, str]:
    """What vLLM's processes need; ``config.env`` over all of it."""
    variables = {
        WATCH_VARIABLE: "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # Every pause and every update is an INFO otherwise.
        "VLLM_LOGGING_LEVEL": "WARNING",
        # A process that was forked inherits Ray's threads in the middle of what they do.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # The log-probabilities of the whole distribution are taken in the sampler of this one.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    if on_cpu(context):
        variables |= {
            "OMP_NUM_THREADS": "1",
            # Compiling takes a minute, and makes a small model ten times slower.
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    return variables | config.env
