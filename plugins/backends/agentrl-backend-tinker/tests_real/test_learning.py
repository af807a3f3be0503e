"""Examples that are trained at ``agentrl tinker serve``, from the models that their scripts make.

Run by ``make test-tinker-learn``: minutes on an idle machine.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from tinker_support.server import Server  # noqa: E402 - beside the tests

from agentrl_core.engine_kit.ports import free_port  # noqa: E402

Curve = list[float]


def validated(rows: list[dict[str, float]]) -> Curve:
    name = "validation/calculator/accuracy_sampled"
    return [row[name] for row in rows if name in row]


def found(rows: list[dict[str, float]]) -> Curve:
    """Means of the first three steps and of the last five."""
    values = [row["reward/environment/found"] for row in rows]
    return [sum(values[:3]) / 3, sum(values[-5:]) / 5]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("name", "overrides", "curve", "most_before", "least_after"),
    [("calculator", ["trainer.steps=6"], validated, 0.4, 0.85), ("guess_number", [], found, 0.6, 0.75)],
)
def test_an_example_is_learned(
    tmp_path: Path,
    name: str,
    overrides: list[str],
    curve: Callable[[list[dict[str, float]]], Curve],
    most_before: float,
    least_after: float,
) -> None:
    example = ROOT / "examples" / name
    for file in example.iterdir():
        if file.suffix in (".py", ".yaml"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    subprocess.run([sys.executable, example / "prepare.py", "--output", tmp_path], check=True, timeout=900)
    server = Server(str(tmp_path / "model"), tmp_path / "state", free_port())
    server.start()
    try:
        agentrl = Path(sys.executable).parent / "agentrl"
        command = [agentrl, "train", "tinker.yaml", "trainer.name=run", *overrides]
        environment = {**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-test"}
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=2700)
    finally:
        server.kill()
    rows = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    values = curve(rows)
    sys.stdout.write(f"{name}: {[round(value, 3) for value in values]}\n")
    assert values[0] < most_before < least_after <= values[-1]
    assert all(row["rollout/logprob_gap_mean"] < 1e-4 for row in rows if "rollout/logprob_gap_mean" in row)
