"""Recipes of ``tinker-cookbook``, unmodified and offline, against a running server."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CHATS = [[f"{word} me", word] for word in ("Tell", "Show", "Give", "Teach") * 8]


def run(server: Any, recipe: str, log: Path, **options: Any) -> list[dict[str, float]]:
    """The metrics of each step."""
    given = {"model_name": server.model, "renderer_name": "qwen3", "log_path": log, **options}
    command = [sys.executable, "-m", f"tinker_cookbook.recipes.{recipe}.train", *(f"{k}={v}" for k, v in given.items())]
    environment = {
        **os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-one", "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
    }  # fmt: skip
    found = subprocess.run(command, env=environment, cwd=log.parent, capture_output=True, text=True, timeout=900)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def test_arithmetic_is_learned(server: Any, tmp_path: Path) -> None:
    """The model is random: what it can learn in a minute is to end its answer, for which the recipe pays a tenth.

    Of answers with 5 tokens, the default, one in 200 ends: some runs saw too few to learn from. Of these, 1 in 40.
    """
    metrics = run(
        server, "math_rl", tmp_path / "log", env="arithmetic", loss_fn="importance_sampling", group_size=16,
        groups_per_batch=8, learning_rate=0.015, lora_rank=8, max_tokens=16, max_steps=16, save_every=0, eval_every=0,
    )  # fmt: skip
    rewards = [each["env/all/reward/total"] for each in metrics if "env/all/reward/total" in each]
    assert len(rewards) == 16
    sys.stdout.write(f"reward by step: {[round(each, 3) for each in rewards]}\n")
    assert rewards[0] < -0.08
    assert rewards[-1] > -0.03
    # The sampler has the weights of the trainer: else the log-probabilities of its samples would differ.
    assert max(abs(each.get("optim/kl_sample_train_v2", 0.0)) for each in metrics) < 1e-4


def test_a_file_of_chats_is_learned(server: Any, tmp_path: Path) -> None:
    data = tmp_path / "chats.jsonl"
    roles = ("user", "assistant")
    lines = [{"messages": [{"role": r, "content": c} for r, c in zip(roles, chat, strict=True)]} for chat in CHATS]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    metrics = run(
        server, "chat_sl", tmp_path / "log", dataset=data, batch_size=4, learning_rate=0.02, lora_rank=8,
        num_epochs=1, max_length=256, eval_every=0, infrequent_eval_every=0, save_every=4,
    )  # fmt: skip
    losses = [each["train_mean_nll"] for each in metrics if "train_mean_nll" in each]
    sys.stdout.write(f"negative log-likelihood by step: {[round(each, 3) for each in losses]}\n")
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("recipe", ["guess_number", "text_arena"])
def test_a_recipe_of_several_turns_runs_to_its_end(server: Any, tmp_path: Path, recipe: str) -> None:
    options = {"batch_size": 2, "max_tokens": 4, "learning_rate": 0.01, "eval_every": 0, "save_every": 0}
    sizes = {"guess_number": {"group_size": 2, "max_steps": 2}, "text_arena": {"num_train_datapoints": 4}}
    metrics = run(server, f"multiplayer_rl.{recipe}", tmp_path / "log", **options, **sizes[recipe])
    assert [each for each in metrics if "env/all/reward/total" in each]
