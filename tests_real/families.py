"""Random models of other families than the suites' Qwen3: mixtures of experts, and one with linear attention.

What a family has in addition (biases, attention sinks, an output layer tied to the embedding) has random values too:
what an engine leaves out or reads in another layout shows in the log-probs.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from agentrl_core.testing.tiny_model import tiny_tokenizer
from tests_real.engine_suite import SHAPE, VOCAB, Models

COMMON = {**SHAPE, "vocab_size": VOCAB, "num_hidden_layers": 2, "max_position_embeddings": 512}
EXPERTS = {**COMMON, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
DENSE_FIRST = {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3_moe, tied": lambda: transformers.Qwen3MoeConfig(**EXPERTS, num_experts=4, tie_word_embeddings=True),
    "mixtral": lambda: transformers.MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **COMMON, num_local_experts=4, num_experts_per_tok=2, sliding_window=32, rope_scaling=None,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **DENSE_FIRST, n_group=2, topk_group=1, q_lora_rank=64, kv_lora_rank=64, qk_rope_head_dim=32,
        qk_nope_head_dim=32, v_head_dim=32, topk_method="noaux_tc",
    ),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(**DENSE_FIRST),
    "qwen3_next, hybrid": lambda: transformers.Qwen3NextConfig(
        **EXPERTS, num_experts=4, shared_expert_intermediate_size=64, linear_num_key_heads=4, linear_num_value_heads=4,
        linear_key_head_dim=32, linear_value_head_dim=32, layer_types=["linear_attention", "full_attention"],
    ),
}  # fmt: skip


class FamilyModels(Models):
    """Models of one of :data:`FAMILIES`."""

    def __init__(self, root: Path, family: str) -> None:
        super().__init__(root, tied="tied" in family)
        self._config = FAMILIES[family]

    def folder(self, seed: int = 0) -> str:
        path = self._root / str(seed)
        if not path.exists():
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                module = AutoModelForCausalLM.from_config(self._config(), dtype=torch.float32)
                for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                    if name.endswith(("bias", "sinks")):
                        tensor.data.normal_(0.0, 0.2)
            module.save_pretrained(path)
            tiny_tokenizer().save_pretrained(path)
        return str(path)
