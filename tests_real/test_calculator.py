"""The calculator example, trained with engines that live in environments of their own.

Run in the trainer's environment by ``make test-engines-learn``, which builds the others.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "calculator"
SAMPLED = "validation/calculator/accuracy_sampled"


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, data and configuration of seed 0."""
    folder = tmp_path_factory.mktemp("calculator")
    (folder / "config.yaml").write_bytes((EXAMPLE / "config.yaml").read_bytes())
    command = [sys.executable, EXAMPLE / "prepare.py", "--output", folder, "--seed", "0"]
    subprocess.run(command, check=True, timeout=600)
    return folder


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_calculator_is_learned(example: Path, engine: str) -> None:
    command = [
        Path(sys.executable).parent / "agentrl", "train", "config.yaml", "cluster.runtime=ray", "trainer.seed=0",
        f"trainer.name={engine}", f"rollout.engine.name={engine}",
        f"rollout.engine.python={ROOT / '.engines' / engine / 'bin' / 'python'}",
    ]  # fmt: skip
    subprocess.run(command, cwd=example, check=True, timeout=1700)
    rows = [json.loads(line) for line in (example / "runs" / engine / "metrics.jsonl").read_text().splitlines()]
    accuracies = [row[SAMPLED] for row in rows if SAMPLED in row]
    assert accuracies[0] < 0.5 < 0.9 <= accuracies[-1]
