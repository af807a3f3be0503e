"""Benchmarks of many runs: what is done is not repeated, and a page says what was measured."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import _runs
import algorithms
import calculator
import staleness


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[_runs.Job]:
    """The jobs that were run; each learns at once."""
    jobs: list[_runs.Job] = []

    def outcomes(chosen: Sequence[_runs.Job], *others: Any) -> Iterator[_runs.Outcome]:
        for job in chosen:
            jobs.append(job)
            steps = next(int(each.split("=")[1]) for each in job.overrides if each.startswith("trainer.steps="))
            yield _runs.Outcome(json.loads(json.dumps(asdict(job))), [0.2] + [0.9] * (steps - 1), 0.9, 1.0, 3.0, {})

    monkeypatch.setattr(_runs, "_outcomes", outcomes)
    monkeypatch.setattr(_runs, "prepare", lambda seed, directory: directory.mkdir(parents=True, exist_ok=True))
    return jobs


def test_the_matrix_runs_every_method_once_and_the_student_after_its_teacher(
    ran: list[_runs.Job], tmp_path: Path
) -> None:
    command = ["--seeds", "2", "--work", str(tmp_path)]
    methods = ["estimator-on_policy_distillation", "estimator-grpo", "loss-gspo", "correction-icepop"]
    algorithms.main([*command, "--methods", *methods[1:]])
    assert [(job.name, job.seed) for job in ran] == [(name, seed) for seed in (0, 1) for name in methods[1:]]
    ran.clear()
    algorithms.main([*command, "--methods", *methods])
    assert [(job.name, job.teacher) for job in ran] == [(methods[0], "estimator-grpo")] * 2
    page = (tmp_path / "algorithms.md").read_text()
    assert page.count("| 0.900 | 0.900 | 1.000 | yes | 3 |") == 4
    assert "Not measured: `estimator-gae`" in page and (tmp_path / "algorithms.png").exists()


def test_stale_runs_differ_by_delay_and_correction(ran: list[_runs.Job], tmp_path: Path) -> None:
    (tmp_path / "staleness.md").write_text("old\n\n## What it shows\n\nKept.\n")
    staleness.main(["--seeds", "1", "--steps", "12", "--work", str(tmp_path)])
    assert len(ran) == 3 * 4 + 2, "without a delay, corrections that weigh do nothing"
    page = (tmp_path / "staleness.md").read_text()
    assert page.count("**0.90** (0.90)") == 16 and page.endswith("## What it shows\n\nKept.\n")
    assert (tmp_path / "staleness.png").exists()


PREPARE = """
import json, shutil, sys

folder = sys.argv[sys.argv.index("--output") + 1]
shutil.copytree({model!r}, f"{{folder}}/model")
rows = [{{"data_source": "calculator", "prompt": [{{"role": "user", "content": "1 + 1?"}}],
          "reward_model": {{"ground_truth": "2"}}}}] * 4
for name in ("train", "validation"):
    with open(f"{{folder}}/{{name}}.jsonl", "w") as file:
        file.writelines(json.dumps(row) + "\\n" for row in rows)
"""
REWARD = "def acc(trajectory):\n    return float('2' in trajectory.model_text)\n"


@pytest.mark.slow
def test_small_runs_are_trained_for_real(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tiny model and a step or two, in the place of the example's minutes."""
    example = tmp_path / "example"
    example.mkdir()
    (example / "prepare.py").write_text(PREPARE.format(model=str(tiny_model)))
    (tmp_path / "reward.py").write_text(REWARD)
    config = {
        "model": {"path": "model"},
        "data": {"train_files": ["train.jsonl"], "validation_files": ["validation.jsonl"], "batch_size": 2},
        "rollout": {"agent": {"loops": ["single_turn"]}, "n": 2, "max_response_length": 4},
        "reward": {"functions": [{"name": f"{tmp_path}/reward.py:acc", "isolation": "inline"}]},
        "trainer": {"output_dir": "runs", "steps": 1, "trackers": ["jsonl"], "validation": {"n": 2}},
        "cluster": {"device": "cpu"},
    }
    (example / "config.yaml").write_text(json.dumps(config))
    monkeypatch.setattr(calculator, "EXAMPLE", example)
    monkeypatch.chdir(tmp_path)
    figures = tmp_path / "figures.json"
    calculator.main([
        "--seeds", "0", "--variants", "grpo", "--work", "work", "--output", ".", "--json", str(figures),
        "rollout.records=none",
    ])  # fmt: skip
    names = [figure["name"] for figure in json.loads(figures.read_text())["figures"]]
    assert len(names) == 5 and (tmp_path / "calculator.png").exists()
    outcome = _runs.train(_runs.Job("again", 0, ("trainer.steps=2",)), tmp_path / "work" / "seed-0")
    assert (len(outcome.rewards), outcome.failure) == (2, "") and 0 <= outcome.accuracy <= 1
