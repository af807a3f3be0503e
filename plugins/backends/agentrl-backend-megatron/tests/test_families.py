"""Models that Megatron-Core would compute differently are refused."""

from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3MoeConfig

from agentrl_backend_megatron.families import Family
from agentrl_core.api.errors import ConfigError


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2Config(), "no names for models of the type 'gpt2'; it knows llama, mistral, qwen2, qwen3, qwen3_moe"),
        (LlamaConfig(attention_bias=True), "cannot compute llama with attention_bias"),
        (LlamaConfig(mlp_bias=True), "cannot compute llama with mlp_bias"),
        (LlamaConfig(hidden_act="gelu"), "with hidden_act='gelu'"),
        (LlamaConfig(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}), "rope_type='linear'"),
        (
            LlamaConfig(
                rope_parameters={
                    "rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4, "low_freq_factor": 2.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
                }
            ),
            r"rope_parameters.low_freq_factor=2.0 \(Megatron-Core computes 1\)",
        ),
        (MistralConfig(sliding_window=64), "sliding window"),
        (Qwen2Config(use_sliding_window=True, max_window_layers=1), "with sliding_attention"),
    ],
)  # fmt: skip
def test_a_model_that_would_be_another_one(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^1 problem in the configuration:\n  - model.path: .*{message}"):
        Family.of(config, "model.path")


def test_layers_without_experts() -> None:
    config = Qwen3MoeConfig(num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3])
    assert Family.of(config, "model.path").dense_layers == {0, 2, 3}
