"""Runs with the Megatron backend on Ray, whose training processes have a separate interpreter."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests_real.engine_suite import SHAPE, Models
from tests_real.families import FamilyModels
from tests_real.test_fleet import python_of

PYTHON = python_of("megatron")
AGENTRL = Path(sys.executable).parent / "agentrl"
CALCULATOR = Path("examples/calculator")
CONFIG = """
data: {train_files: [rows.jsonl], batch_size: 2, max_prompt_length: 64}
rollout: {agent: {loops: [single_turn]}, n: 2, max_response_length: 8}
reward: {functions: ["./reward.py:score"]}
algorithm: {entropy_coef: 0.01, kl_coef: 0.1}
actor: {mini_batches: 2, micro_batch_tokens: 64, optimizer: {lr: 1.0e-3}}
cluster: {runtime: ray, processes_per_node: 2, device: cpu}
trainer: {steps: 2, trackers: [jsonl], backend: {name: megatron}}
"""


@pytest.mark.parametrize(
    ("mesh", "engine", "family"),
    [
        ("tensor_parallel", "hf", "dense"),
        ("pipeline_parallel", "sglang", "dense"),
        ("context_parallel", "vllm", "dense"),
        ("expert_parallel", "hf", "qwen3_moe, tied"),
        ("expert_parallel", "sglang", "qwen3_moe, tied"),
        ("expert_parallel", "vllm", "qwen3_moe, tied"),
    ],
)
def test_two_ranks_of_one_model_train_a_run(tmp_path: Path, mesh: str, engine: str, family: str) -> None:
    """Log-probs, reference, updates, a checkpoint, and weights to the engine, whose log-probs stay those of Megatron."""
    models = Models(tmp_path / "model", tied=False) if family == "dense" else FamilyModels(tmp_path / "model", family)
    row = {"prompt": "say a", "data_source": "tests", "reward_model": {"ground_truth": "a"}}
    (tmp_path / "rows.jsonl").write_text(4 * (json.dumps(row) + "\n"))
    (tmp_path / "reward.py").write_text("def score(trajectory):\n    return float(len(trajectory.last_text) % 3)\n")
    (tmp_path / "config.yaml").write_text(CONFIG)
    options = [
        f"model.path={models.folder()}", f"trainer.backend.python={PYTHON}", f"trainer.backend.config.{mesh}=2",
        f"rollout.engine.name={engine}",
    ]  # fmt: skip
    if engine != "hf":
        options.append(f"rollout.engine.python={python_of(engine)}")
    subprocess.run([AGENTRL, "train", "config.yaml", *options], cwd=tmp_path, check=True)
    run = tmp_path / "runs" / "run"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert step["rollout/logprob_gap_mean"] < 1e-4 and step["actor/grad_norm"] > 0 and step["actor/entropy"] > 0
    assert [*(run / "checkpoints" / "latest" / "actor").glob("*.safetensors")]


@pytest.mark.timeout(1800)
def test_calculator_learns(tmp_path: Path) -> None:
    subprocess.run([sys.executable, CALCULATOR / "prepare.py"], check=True)
    command = [
        AGENTRL, "train", CALCULATOR / "config.yaml", "cluster.runtime=ray",
        "cluster.processes_per_node=2", "trainer.backend.name=megatron", f"trainer.backend.python={PYTHON}",
        "trainer.backend.config.tensor_parallel=2", f"trainer.output_dir={tmp_path}", "trainer.name=megatron",
    ]  # fmt: skip
    subprocess.run(command, check=True)
    rows = [json.loads(line) for line in (tmp_path / "megatron" / "metrics.jsonl").read_text().splitlines()]
    measured = [value for row in rows if (value := row.get("validation/calculator/accuracy_sampled")) is not None]
    assert measured[-1] > 0.8 > 0.4 > measured[0]
