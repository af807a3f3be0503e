"""Runs that send tokens to the experts which the engine chose."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentrl_core.api import ConfigError
from agentrl_core.runs.run_dir import RunDir
from agentrl_testing.tiny_model import tiny_tokenizer

REPLAY = {
    "actor.router_replay": True, "actor.micro_batch_tokens": 600, "rollout.n": 4, "trainer.steps": 3,
    "rollout.engine": "hf", "rollout.agent.loops": ["single_turn"],
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("experts")
    tokenizer = tiny_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=2048, initializer_range=0.2, num_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=16, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def test_the_trainer_takes_the_experts_of_the_engine(fit: Callable[..., RunDir], model: str) -> None:
    run = fit({**REPLAY, "model.path": model, "algorithm.old_log_probs": "actor"})
    rows = run.read_metrics()
    assert len(rows) == 3
    for row in rows:
        # In one process engine and trainer compute alike: they choose the same experts but where scores are equal.
        assert row["actor/router_difference"] < 1e-3
        assert row["rollout/logprob_gap_max"] < 1e-4


@pytest.mark.slow
def test_an_engine_in_bfloat16_chooses_others_and_is_followed(fit: Callable[..., RunDir], model: str) -> None:
    changes = {
        "model.path": model, "algorithm.old_log_probs": "actor", "rollout.engine": {"name": "hf", "dtype": "bfloat16"},
        "cluster.runtime": "ray", "rollout.max_logprob_gap": None, "rollout.max_response_length": 64,
    }  # fmt: skip
    followed = fit({**REPLAY, **changes, "trainer.name": "followed", "trainer.steps": 1}).read_metrics()[0]
    alone = fit(
        {**REPLAY, **changes, "trainer.name": "alone", "trainer.steps": 1, "actor.router_replay": False}
    ).read_metrics()[0]
    assert 0 < followed["actor/router_difference"] < 0.2
    assert "actor/router_difference" not in alone
    assert followed["rollout/logprob_gap_mean"] < alone["rollout/logprob_gap_mean"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout.engine": "scripted"}, "lacks the capability 'routed_experts', which actor.router_replay=true needs"),
        ({}, "actor.router_replay: Qwen3ForCausalLM has no routers"),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    fit: Callable[..., RunDir], tiny_model: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        fit({**REPLAY, "model.path": str(tiny_model), **changes})
