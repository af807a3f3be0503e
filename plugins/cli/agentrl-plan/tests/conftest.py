import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.config import ResolvedConfig, load_config

MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 512, "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
CONFIG = """
model: {path: model, gradient_checkpointing: true}
data: {batch_size: 4, max_prompt_length: 32, train_files: [none.jsonl]}
rollout: {n: 2, max_response_length: 96, agent: {loops: [{name: single_turn}]}}
reward: {functions: [{name: exact_match}]}
actor: {micro_batch_tokens: 512}
cluster: {device: cpu}
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Callable[..., Path]:
    """Write a configuration and the config.json of its model, which has no weights."""

    def write(**model: Any) -> Path:
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / "config.json").write_text(json.dumps({**MODEL, **model}))
        (tmp_path / "config.yaml").write_text(CONFIG)
        return tmp_path / "config.yaml"

    return write


@pytest.fixture
def make_config(config_file: Callable[..., Path]) -> Callable[..., ResolvedConfig]:
    def make(*overrides: str, **model: Any) -> ResolvedConfig:
        return load_config(config_file(**model), overrides, check_files=False)

    return make
