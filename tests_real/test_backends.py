"""Runs of training backends with real engines: Megatron-Core, and the built-in one with experts that SGLang chose.

Run in the trainer's environment by ``make test-megatron``; engines that are not installed are skipped.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests_real.engine_suite import Models
from tests_real.families import UNTIED_EXPERTS, FamilyModels
from tests_real.test_fleet import python_of

pytestmark = [pytest.mark.ray, pytest.mark.timeout(1800)]
AGENTRL = Path(sys.executable).parent / "agentrl"
CALCULATOR = Path("examples/calculator")
EXPERTS = "qwen3_moe, tied"
CONFIG = """
data: {train_files: [rows.jsonl], batch_size: 2, max_prompt_length: 64}
rollout: {agent: {loops: [single_turn]}, n: 2, max_response_length: 8}
reward: {functions: ["./reward.py:score"]}
algorithm: {entropy_coef: 0.01, kl_coef: 0.1}
actor: {mini_batches: 2, micro_batch_tokens: 64, optimizer: {lr: 1.0e-3}}
cluster: {runtime: ray, processes_per_node: 2, device: cpu}
trainer: {steps: 2, trackers: [jsonl]}
"""


def trained(folder: Path, engine: str, family: str, *options: str) -> list[dict[str, Any]]:
    """Metrics of two steps with a reference and a checkpoint; new weights reach the engine in between."""
    models = FamilyModels(folder / "model", family) if family else Models(folder / "model", tied=False)
    row = {"prompt": "say a", "data_source": "tests", "reward_model": {"ground_truth": "a"}}
    (folder / "rows.jsonl").write_text(4 * (json.dumps(row) + "\n"))
    (folder / "reward.py").write_text("def score(trajectory):\n    return float(len(trajectory.last_text) % 3)\n")
    (folder / "config.yaml").write_text(CONFIG)
    changes = [f"model.path={models.folder()}", f"rollout.engine.name={engine}", *options]
    if engine != "hf":
        # One, because a start takes two cores for a minute.
        changes += [f"rollout.engine.python={python_of(engine)}", "rollout.engine.replicas=1"]
    subprocess.run([AGENTRL, "train", "config.yaml", *changes], cwd=folder, check=True)
    steps = [json.loads(line) for line in (folder / "runs/run/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        # An update changes log-probs by about 0.1.
        assert step["rollout/logprob_gap_mean"] < 1e-4 and step["actor/grad_norm"] > 0 and step["actor/entropy"] > 0
    assert [*(folder / "runs/run/checkpoints/latest/actor").glob("*.safetensors")]
    return steps


@pytest.mark.parametrize(
    ("mesh", "engine", "family"),
    [
        ("tensor_parallel", "hf", ""),
        ("expert_parallel", "hf", EXPERTS),
        ("pipeline_parallel", "sglang", UNTIED_EXPERTS),
        ("context_parallel", "vllm", EXPERTS),
    ],
)
def test_two_ranks_of_megatron_train_a_run(tmp_path: Path, mesh: str, engine: str, family: str) -> None:
    python = python_of("megatron")
    backend = "trainer.backend.name=megatron", f"trainer.backend.python={python}"
    trained(tmp_path, engine, family, *backend, f"trainer.backend.config.{mesh}=2")


def test_two_ranks_take_the_experts_of_sglang(tmp_path: Path) -> None:
    options = "actor.router_replay=true", "trainer.backend.config.expert_parallel=2"
    for step in trained(tmp_path, "sglang", UNTIED_EXPERTS, *options):
        assert step["actor/router_difference"] < 0.05


def test_calculator_learns(tmp_path: Path) -> None:
    subprocess.run([sys.executable, CALCULATOR / "prepare.py"], check=True)
    command = [
        AGENTRL, "train", CALCULATOR / "config.yaml", "cluster.runtime=ray",
        "cluster.processes_per_node=2", "trainer.backend.name=megatron",
        f"trainer.backend.python={python_of('megatron')}", "trainer.backend.config.tensor_parallel=2",
        f"trainer.output_dir={tmp_path}", "trainer.name=megatron",
    ]  # fmt: skip
    subprocess.run(command, check=True)
    rows = [json.loads(line) for line in (tmp_path / "megatron" / "metrics.jsonl").read_text().splitlines()]
    measured = [value for row in rows if (value := row.get("validation/calculator/accuracy_sampled")) is not None]
    assert measured[-1] > 0.8 > 0.4 > measured[0]
