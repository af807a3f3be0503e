"""``agentrl bench``."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from agentrl_core.cli.main import app
from agentrl_core.devtools.step_bench import figures


def agentrl(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def test_figures_are_medians_and_leave_nothing_out() -> None:
    rows = [
        {"timing/step": 4.0, "timing/rollout": 3.0, "timing/score": 0.5, "perf/tokens_per_second": 100.0},
        {"timing/step": 2.0, "timing/rollout": 1.0, "perf/tokens_per_second": 300.0, "timing/trajectory/tools": 9.0},
        {"timing/step": 3.0, "timing/rollout": 2.0, "timing/score": 0.25, "perf/tokens_per_second": 200.0},
    ]
    found = figures(rows)
    assert (found.seconds, found.tokens_per_second) == (3.0, 200.0)
    assert list(found.phases.items()) == [("rollout", 2.0), ("score", 0.25), ("other", 0.75)]


def test_bench_compares_two_configs_and_keeps_nothing(tiny_run: Any) -> None:
    config = tiny_run({"rollout.engine": {"name": "scripted"}})
    other = config.with_name("other.yaml")
    other.write_text(f"extends: {config.name}\nrollout: {{n: 3}}\n")
    result = agentrl("bench", config, "--against", other, "--steps", 1, "--pairs", 2, "--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert list(content["configs"]) == [str(config), str(other)] and len(content["ratios"]) == 2
    for found in content["configs"].values():
        assert found["phases"].keys() >= {"rollout", "update_actor", "sync_weights", "other"}
        assert sum(found["phases"].values()) == pytest.approx(found["seconds"], rel=0.01)
        assert found["tokens_per_second"] > 0
    assert not (config.parent / "runs").exists()


def test_the_table_has_shares(tiny_run: Any) -> None:
    result = agentrl("bench", tiny_run({"rollout.engine": {"name": "scripted"}}), "--steps", 1)
    assert result.exit_code == 0, result.output
    assert "update_actor" in result.stdout and "100%" in result.stdout and "tokens per second" in result.stdout
