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

from agentrl_testing.tiny_model import tiny_tokenizer
from tests_real.engine_suite import SHAPE, VOCAB, Models

COMMON = {**SHAPE, "vocab_size": VOCAB, "num_hidden_layers": 2, "max_position_embeddings": 512}
EXPERTS = {**COMMON, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
DENSE_FIRST = {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
UNTIED_EXPERTS = "qwen3_moe"
"""As SGLang takes it, which leaves the output layer of this family without weights where it is tied."""
FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3_moe, tied": lambda: transformers.Qwen3MoeConfig(**EXPERTS, num_experts=4, tie_word_embeddings=True),
    UNTIED_EXPERTS: lambda: transformers.Qwen3MoeConfig(**EXPERTS, num_experts=4, tie_word_embeddings=False),
    "mixtral": lambda: transformers.MixtralConfig(**COMMON, num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **COMMON, num_local_experts=4, num_experts_per_tok=2, sliding_window=32, rope_scaling=None,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(**DENSE_FIRST),
    "granite, hybrid": lambda: transformers.GraniteMoeHybridConfig(
        **COMMON, layer_types=["mamba", "attention"], num_local_experts=4, num_experts_per_tok=2,
        shared_intermediate_size=64, mamba_n_heads=8, mamba_d_head=32, mamba_d_state=32, mamba_n_groups=1,
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
