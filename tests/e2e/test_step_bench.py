"""``agentrl bench``."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from agentrl_core.api import ConfigError
from agentrl_core.cli.main import app
from agentrl_plan.step_bench import checkout, environment_of, figures


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


ROOT = Path(__file__).parents[2]
needs_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="agentrl does not run from a git repository")


@needs_git
def test_a_commit_is_imported_from_its_own_checkout() -> None:
    code = """
import asyncio
import agentrl_core, agentrl_algorithms
from agentrl_core.hosting.process_host import ProcessHost

async def main():
    host = ProcessHost(eval, ("__import__('agentrl_core').__file__.__str__",), "a tool")
    print(await host.call("", (), {}, 60))
    await host.close()

print(agentrl_core.__file__, agentrl_algorithms.__file__)
asyncio.run(main())
"""
    with checkout("HEAD") as folder:
        imported = subprocess.check_output([sys.executable, "-c", code], env=environment_of(folder), text=True).split()
        assert [Path(file).is_relative_to(folder) for file in imported] == [True] * 3
    listed = subprocess.check_output(["git", "-C", ROOT, "worktree", "list"], text=True)
    assert str(folder) not in listed and not folder.exists()


@pytest.mark.slow
@needs_git
def test_bench_compares_two_commits(tiny_run: Any) -> None:
    config = tiny_run({"rollout.engine": {"name": "scripted"}})
    result = agentrl("bench", config, "--against", "HEAD", "--steps", 1, "--pairs", 1, "--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert list(content["configs"]) == [str(config), f"{config} at HEAD"] and content["ratios"][0] > 0
    assert all(found["phases"].keys() >= {"rollout", "other"} for found in content["configs"].values())


def test_what_is_neither_a_file_nor_a_commit_is_an_error() -> None:
    with pytest.raises(ConfigError, match="'--no-such' is neither a file nor a commit"), checkout("--no-such"):
        pass


def test_the_table_has_shares(tiny_run: Any) -> None:
    result = agentrl("bench", tiny_run({"rollout.engine": {"name": "scripted"}}), "--steps", 1)
    assert result.exit_code == 0, result.output
    assert "update_actor" in result.stdout and "100%" in result.stdout and "tokens per second" in result.stdout
