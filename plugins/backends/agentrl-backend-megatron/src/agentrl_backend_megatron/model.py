"""A model of the Hugging Face hub as Megatron-Core's modules, without weights.

Shapes: s tokens of a row (of this rank's part of them with sequence parallelism), b rows, H hidden size.
"""

from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from agentrl_backend_megatron.config import MegatronConfig
from agentrl_backend_megatron.families import Family
from agentrl_backend_megatron.mesh import KEY, Mesh
from agentrl_core.api.errors import ConfigError


class HiddenStates(GPTModel):  # type: ignore[misc]  # Megatron-Core has no types
    """A language model that stops before its output head: the last stage gives hidden states [s, b, H]."""

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states

    @property
    def head_weight(self) -> Tensor:
        """This rank's rows of the output head."""
        tied = self.share_embeddings_and_output_weights
        weight: Tensor = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return weight


def uses_transformer_engine(config: MegatronConfig) -> bool:
    """Raises:
    ConfigError: it is asked for and not installed.
    """
    is_there = find_spec("transformer_engine") is not None
    if config.implementation == "transformer_engine" and not is_there:
        raise ConfigError(
            f"{KEY}.implementation: transformer_engine is not installed in this environment (pip install "
            "'transformer-engine[pytorch]', which needs CUDA), or set implementation=local, which is slow on GPUs"
        )
    return is_there if config.implementation == "auto" else config.implementation == "transformer_engine"


def transformer_config(
    config: MegatronConfig, family: Family, mesh: Mesh, dtype: torch.dtype, recomputes: bool
) -> TransformerConfig:
    """Args:
        dtype: of parameters and passes.
        recomputes: activations, in the backward pass.

    Raises:
        ConfigError: an argument of ``transformer_config`` is unknown, or excluded by others.
    """
    fast = uses_transformer_engine(config)
    made: dict[str, Any] = {
        "num_layers": family.layers, "hidden_size": family.hidden, "ffn_hidden_size": family.inner,
        "num_attention_heads": family.heads, "num_query_groups": family.groups, "kv_channels": family.head_size,
        "normalization": "RMSNorm", "layernorm_epsilon": family.epsilon, "qk_layernorm": family.qk_norm,
        "gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False,
        "add_qkv_bias": family.qkv_bias, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "tensor_model_parallel_size": mesh.tensor, "pipeline_model_parallel_size": mesh.pipeline,
        "context_parallel_size": mesh.context,
        "expert_model_parallel_size": mesh.expert, "expert_tensor_parallel_size": 1,
        "sequence_parallel": config.sequence_parallel and mesh.tensor > 1,
        "params_dtype": dtype, "pipeline_dtype": dtype, "bf16": dtype == torch.bfloat16,
        # Micro-batches are cropped to their longest row.
        "variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall",
        # Losses say themselves what they are divided by.
        "calculate_per_token_loss": True,
        "perform_initialization": False, "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": fast, "bias_activation_fusion": fast, "bias_dropout_fusion": fast,
        "attention_softmax_in_fp32": True,
        **({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
           if recomputes else {}),
        **(_experts(family) if family.experts else {}),
    }  # fmt: skip
    try:
        return TransformerConfig(**{**made, **config.transformer_config})
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"{KEY}.transformer_config: Megatron-Core refuses it: {error}") from error


def _experts(family: Family) -> dict[str, Any]:
    return {
        "num_moe_experts": family.experts, "moe_router_topk": family.chosen,
        "moe_ffn_hidden_size": family.inner_expert, "moe_router_pre_softmax": not family.renormalizes,
        "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_layer_freq": [int(layer not in family.dense_layers) for layer in range(family.layers)],
    }  # fmt: skip


def build(made: TransformerConfig, config: MegatronConfig, family: Family, mesh: Mesh, longest: int) -> HiddenStates:
    """This rank's part of the model; its weights are not set.

    Args:
        longest: tokens of the longest row.

    Raises:
        ConfigError: the layers cannot split rows over ranks.
    """
    fast = uses_transformer_engine(config)
    try:
        return HiddenStates(
            made, _layers(made, fast), padded_vocabulary(family, mesh), longest,
            pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=family.is_tied, position_embedding_type="rope",
            rotary_base=family.rope_base, rope_scaling=family.rope_scaling is not None,
            rope_scaling_factor=family.rope_scaling or 1.0,
        )  # fmt: skip
    except AssertionError as error:
        # Megatron-Core's own attention says so when it is made.
        if fast or mesh.context == 1:
            raise
        raise ConfigError(
            f"{KEY}.context_parallel: found {mesh.context}, which needs the layers of Transformer Engine (pip install "
            "'transformer-engine[pytorch]' in this environment, which needs CUDA); set it to 1 or install them"
        ) from error


def _layers(made: TransformerConfig, fast: bool) -> Any:
    spec: Any = get_gpt_decoder_block_spec(made, use_transformer_engine=fast, normalization="RMSNorm")
    if fast:
        return spec
    spec.layer_norm = Norm
    for layer in spec.layer_specs:
        parts, attention = layer.submodules, layer.submodules.self_attention.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = Norm
        if made.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = Norm
    return spec


class Norm:
    """Torch's RMSNorm also with sequence parallelism, where Megatron-Core has none without Transformer Engine."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> Any:
        made = torch.nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype)
        # Each rank has seen a part of the tokens: their gradients are added up.
        made.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return made


def padded_vocabulary(family: Family, mesh: Mesh) -> int:
    """With tokens that do not exist, so that all ranks have as many."""
    return -(-family.vocabulary // mesh.tensor) * mesh.tensor
