"""``agentrl runs``: what the runs of a directory did, and how they differ."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from agentrl_core.cli.main import app
from agentrl_core.runs.run_dir import RunDir

Fit = Callable[..., RunDir]
SCRIPTED = {"rollout.engine": {"name": "scripted"}}
VALIDATED = {"data.validation_files": ["validation.jsonl"]}


def agentrl(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "300"})


def test_runs_are_listed_with_their_status(fit: Fit, tiny_run: Any) -> None:
    run = fit({**SCRIPTED, **VALIDATED, "trainer.steps": 1})
    fit({**SCRIPTED, "trainer.name": "killed"}).write_state("running", 1)
    result = agentrl("runs", "list", run.path.parent)
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows[0] == ["RUN", "STATUS", "STEP", "REWARD", "ACCURACY", "WRITTEN"]
    assert {(Path(row[0]).name, row[1], row[2]) for row in rows[1:]} == {
        ("tiny", "completed", "1"),
        ("killed", "interrupted", "1"),
    }
    assert next(row for row in rows if row[0].endswith("tiny"))[4] != "-"
    listed = json.loads(agentrl("runs", "list", run.path.parent, "--json").stdout)["runs"]
    assert [(Path(each["run"]).name, each["step"]) for each in listed] == [("killed", 1), ("tiny", 1)]
    none = agentrl("runs", "list", tiny_run.folder)
    assert none.exit_code == 1 and "holds no run" in none.output


def test_runs_are_compared(fit: Fit) -> None:
    config = {**SCRIPTED, "trainer.steps": 1}
    runs = [fit({**config, "trainer.name": f"lr-{lr}", "actor.optimizer.lr": lr}) for lr in (1e-5, 1e-4)]
    rows = [
        [{"step": 1, "reward/mean": 0.9, "mine": 1}, {"step": 2, "reward/mean": 0.5}],
        [{"step": 1, "reward/mean": 0.2}],
    ]
    for run, lines in zip(runs, rows, strict=True):
        run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in lines))
    paths = [run.path for run in runs]
    found = json.loads(agentrl("runs", "compare", *paths, "--metric", "mine", "--json").stdout)
    assert found["config"] == {"actor.optimizer.lr": [1e-5, 1e-4]}
    last, highest = ([each[which] for each in found["metrics"]["reward/mean"]] for which in ("last", "highest"))
    assert [point["value"] for point in last] == [0.5, 0.2]
    assert highest == [{"step": 1, "value": 0.9}, {"step": 1, "value": 0.2}]
    assert found["metrics"]["mine"][1] == {"last": None, "highest": None}
    table = agentrl("runs", "compare", *paths).stdout
    assert re.search(r"actor.optimizer.lr +1e-05 +0.0001", table)
    assert re.search(r"reward/mean \(highest\) +0.9 at step 1 +0.2 at step 1", table)
    assert agentrl("runs", "compare", paths[0]).exit_code == 2
    assert "no such run" in agentrl("runs", "compare", paths[0], "nowhere").output
    assert "no run logged it; allowed are" in agentrl("runs", "compare", *paths, "--metric", "rewards").output


def test_runs_list_shows_the_accuracy_of_greedy_answers(fit: Fit) -> None:
    """Not its mean with that of samples."""
    run = fit({**SCRIPTED, "trainer.steps": 1})
    row = {"step": 1, "validation/a/accuracy_greedy": 1.0, "validation/a/accuracy_sampled": 0.0}
    run.metrics_file.write_text(json.dumps(row) + "\n")
    assert json.loads(agentrl("runs", "list", run.path.parent, "--json").stdout)["runs"][0]["accuracy"] == 1.0
