"""Models whose attention has something that the default implementation leaves out."""

import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, FalconConfig, Gemma2Config, Llama4TextConfig, LlamaConfig, Phi3Config

from agentrl_core.api.errors import ConfigError
from agentrl_core.config.schema import ModelConfig
from agentrl_core.fsdp2.models import empty_causal_lm
from agentrl_core.workers.actor import ActorWorker

VOCAB = 40
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.5,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
LLAMA4: dict[str, Any] = {**SHAPE, "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 64,
                          "moe_layers": [], "no_rope_layers": [1, 0]}  # fmt: skip
FAMILIES = {
    "Gemma 2's soft cap": Gemma2Config(**SHAPE, attn_logit_softcapping=5.0, sliding_window=64),
    "Falcon's ALiBi": FalconConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                                   alibi=True, initializer_range=0.5, bos_token_id=None, eos_token_id=1),
    "Llama 4's chunks": Llama4TextConfig(**LLAMA4, attention_chunk_size=6, attn_temperature_tuning=True,
                                         floor_scale=128),
}  # fmt: skip


SHORT, LONG = [1.0] * 4, [1.5, 4.0, 9.0, 30.0]


def longrope(reaches: int, **factors: list[float]) -> Phi3Config:
    """A Phi-3 that was trained for rows of this many tokens, and extended by other rotary factors beyond."""
    parameters = {"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": reaches,
                  "short_factor": SHORT, "long_factor": LONG, **factors}  # fmt: skip
    shape = {name: value for name, value in SHAPE.items() if name != "head_dim"}
    return Phi3Config(**shape, rope_parameters=parameters, original_max_position_embeddings=reaches)


@pytest.fixture
def make_actor(make_config: Callable[..., Any], tmp_path: Path) -> Callable[..., ActorWorker]:
    def make(config: Any) -> ActorWorker:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        actor = ActorWorker(make_config(path=str(tmp_path)), 1)
        actor.config.data.max_prompt_length = 16
        actor.init_model()
        return actor

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_eager_attention_on_rows_without_padding(
    make_actor: Any, make_batch: Any, rows: Any, tmp_path: Path, family: str
) -> None:
    actor = make_actor(FAMILIES[family])
    ours = actor.compute_log_prob(make_batch(rows)).batch["old_log_probs"]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    for number, (prompt, response, mask) in enumerate(rows):
        with torch.no_grad():
            logits = plain(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(response).unsqueeze(-1)).squeeze(-1)
        sampled = torch.tensor(mask).bool()
        torch.testing.assert_close(ours[number, : len(response)][sampled], expected[sampled], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("config", [longrope(32), longrope(8, short_factor=LONG)], ids=["within", "one set"])
def test_longrope_computes_each_row_as_alone(make_actor: Any, make_batch: Any, tmp_path: Path, config: Any) -> None:
    actor = make_actor(config)
    rows = [([3, 4, 5], [6, 7], [1, 1]), ([8, 9, 10, 11, 12, 13], [14] * 9, [1] * 9)]
    ours = actor.compute_log_prob(make_batch(rows)).batch["old_log_probs"]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    for number, (prompt, response, _) in enumerate(rows):
        with torch.no_grad():
            logits = plain(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(response).unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(ours[number, : len(response)], expected, atol=1e-4, rtol=1e-4)


def test_a_long_row_of_longrope_would_change_the_others_and_is_refused(make_actor: Any) -> None:
    with pytest.raises(ConfigError, match="model.path: longrope.*more than 31 tokens.*up to 32.*short_factor"):
        make_actor(longrope(31))


def test_rows_beyond_the_trained_context_of_dynamic_scaling_are_refused(make_actor: Any) -> None:
    """One long row would give the others other frequencies, and engines scale from another length."""

    def dynamic(reaches: int) -> LlamaConfig:
        parameters = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
        return LlamaConfig(**{**SHAPE, "max_position_embeddings": reaches}, rope_parameters=parameters)

    make_actor(dynamic(32))
    with pytest.raises(ConfigError, match="model.path: dynamic RoPE scaling.*more than 31 tokens.*up to 32"):
        make_actor(dynamic(31))


@pytest.mark.parametrize("family", ["Gemma 2's soft cap", "Falcon's ALiBi"])
def test_a_model_with_eager_attention_says_why_it_is_not_packed(
    make_actor: Any, caplog: pytest.LogCaptureFixture, family: str
) -> None:
    caplog.set_level("INFO")
    make_actor(FAMILIES[family])
    assert "computes padded rows: only sdpa attention can be packed, this model has eager" in caplog.text


@pytest.mark.parametrize(("family", "named"), [("Gemma 2's soft cap", "softcapping"), ("Falcon's ALiBi", "alibi")])
def test_the_change_to_eager_attention_is_logged(
    make_actor: Any, caplog: pytest.LogCaptureFixture, family: str, named: str
) -> None:
    make_actor(FAMILIES[family])
    assert "model.attn_implementation: sdpa" in caplog.text and named in caplog.text and "eager" in caplog.text


def test_temperature_tuning_within_reach_of_the_padding_is_refused(make_actor: Any) -> None:
    config = Llama4TextConfig(**LLAMA4, attention_chunk_size=64, attn_temperature_tuning=True, floor_scale=20)
    with pytest.raises(ConfigError, match="model.path: attn_temperature_tuning.*token 20.*up to 32.*max_prompt_length"):
        make_actor(config)


def test_a_model_that_this_node_lacks_is_named_with_the_node_where_weights_are_sharded(tmp_path: Path) -> None:
    text = f"'{tmp_path}/model' is not a directory on node {socket.gethostname()}"
    with pytest.raises(ConfigError, match=re.escape(text)):
        empty_causal_lm(str(tmp_path / "model"), ModelConfig(str(tmp_path / "model")))
