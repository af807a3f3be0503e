"""The cache of a request against published figures, and against what transformers keeps."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    DynamicCache,
    Gemma3nTextConfig,
    LlamaConfig,
    Qwen2Config,
)

from agentrl_plan.engines import request_bytes

TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8,
}  # fmt: skip
ALTERNATING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 65, "use_sliding_window": True}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 16, "num_experts": 0, "decoder_sparse_step": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (DeepseekV3Config(num_hidden_layers=61), 70_272),
        (Qwen2Config(num_hidden_layers=80, hidden_size=8192, num_attention_heads=64, num_key_value_heads=8), 327_680),
        (LlamaConfig(num_hidden_layers=126, hidden_size=1024, num_attention_heads=8, head_dim=128), 516_096),
    ],
    ids=["DeepSeek-V3", "Qwen2.5-72B", "LLaMA-3.1-405B"],
)
def test_a_token_s_cache_is_as_large_as_published(config: Any, published: int) -> None:
    """arXiv 2505.09343, table 1: bytes for each token in bfloat16."""
    assert request_bytes(config, 1000, 2) == 1000 * published


def test_devices_split_heads_and_copy_latent_vectors() -> None:
    assert request_bytes(DeepseekV3Config(num_hidden_layers=61), 1, 2, devices=8) == 70_272
    heads = LlamaConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=8, num_key_value_heads=2)
    assert [request_bytes(heads, 1, 2, devices) for devices in (1, 2, 8)] == [128, 64, 64]


@pytest.mark.parametrize(
    ("kind", "more"), [("qwen3", {}), ("qwen3", ALTERNATING), ("qwen3_next", LINEAR)], ids=["full", "sliding", "linear"]
)
def test_a_request_s_cache_is_what_transformers_keeps(kind: str, more: dict[str, Any]) -> None:
    config = AutoConfig.for_model(kind, **TINY, num_hidden_layers=2, **more)
    model = AutoModelForCausalLM.from_config(config).eval()
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(torch.ones(1, 200, dtype=torch.long), past_key_values=cache)
    kept = 0
    for layer in cache.layers:
        for value in vars(layer).values():
            for tensor in value.values() if isinstance(value, dict) else [value]:
                kept += tensor.nbytes if isinstance(tensor, torch.Tensor) and tensor.numel() > 1 else 0
    # Of a window it keeps one token less; it keeps one more input of a convolution.
    assert request_bytes(config, 200, 4) == pytest.approx(kept, rel=0.02)


def test_layers_that_read_the_cache_of_others_have_none() -> None:
    """Gemma 3n: 35 layers, the last 15 of which share."""
    text = Gemma3nTextConfig()
    own = text.layer_types[: 35 - 15]
    tokens = [text.sliding_window if kind == "sliding_attention" else 32_000 for kind in own]
    assert request_bytes(text, 32_000, 2) == sum(tokens) * 2 * 2 * text.num_key_value_heads * text.head_dim
