"""Whole runs at a server, started as a user starts them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

AGENTRL = Path(sys.executable).parent / "agentrl"
CONFIG = """
model: {path: model, adapter: {rank: 4}}
data: {train_files: [rows.jsonl], batch_size: 2, max_prompt_length: 64}
rollout: {agent: {loops: [single_turn]}, engine: {name: tinker}, n: 2, max_response_length: 8}
reward: {functions: ["./reward.py:score"]}
actor: {mini_batches: 2, optimizer: {lr: 1.0e-3}}
cluster: {device: cpu}
trainer: {steps: 4, trackers: [jsonl], checkpoint: {interval: 10}, backend: {name: tinker}}
hooks: [{name: tinker_limits, config: {max_tokens: 600}}]
"""


@pytest.fixture
def folder(tmp_path: Path, model: str) -> Path:
    """A run's configuration and data, and of the model what a machine without its weights has."""
    shutil.copytree(model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    row = {"prompt": "say a", "data_source": "tests", "reward_model": {"ground_truth": "a"}}
    (tmp_path / "rows.jsonl").write_text(4 * (json.dumps(row) + "\n"))
    (tmp_path / "reward.py").write_text("def score(trajectory):\n    return float(len(trajectory.last_text) % 3)\n")
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


@pytest.mark.slow
def test_a_limit_ends_a_run_that_goes_on_with_a_higher_one(folder: Path, server: Any) -> None:
    def train(*overrides: str) -> tuple[list[dict[str, Any]], str]:
        where = [f"{key}.config.url={server.url}" for key in ("trainer.backend", "rollout.engine")]
        where += [f"{key}.config.base_model={server.model}" for key in ("trainer.backend", "rollout.engine")]
        command = [AGENTRL, "train", "config.yaml", *where, *overrides]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = (folder / "runs/run/metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines], done.stdout + done.stderr

    first, output = train()
    assert 1 <= len(first) < 4 and "of the hook tinker_limits" in " ".join(output.split())
    checkpoint = folder / "runs/run/checkpoints" / f"step-{len(first):06d}"
    assert (checkpoint / "actor/training/tinker.json").is_file() and (folder / "runs/run/tinker-spent.json").is_file()
    whole, _ = train("hooks.0.config.max_tokens=100000", "trainer.resume=auto")
    assert [row["step"] for row in whole] == [1, 2, 3, 4] and whole[: len(first)] == first
    assert all(row["rollout/logprob_gap_mean"] < 1e-4 for row in whole)
    assert sum(row["actor/trained_tokens"] for row in whole) > 0
