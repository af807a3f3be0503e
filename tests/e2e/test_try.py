"""``agentrl try``."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from agentrl_core.cli.main import app


def agentrl(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "300"})


@pytest.mark.slow
def test_a_tool_that_always_raises_is_seen_before_training(tiny_run: Any) -> None:
    (tiny_run.folder / "broken.py").write_text(
        "def lookup(city: str) -> str:\n    'Looks up.'\n    return {}[city]\n\n"
        "def score(trajectory):\n    return trajectory.nothing\n"
    )
    path = tiny_run({
        "tools": ["./broken.py:lookup"], "rollout.agent.loops": ["tool_agent"],
        "reward.functions": ["./broken.py:score"], "data.max_prompt_length": 400,
    })  # fmt: skip
    result = agentrl("try", path)
    assert result.exit_code == 0, result.output
    assert "tool lookup(city='1') failed:" in result.output and "return {}[city]" in result.output
    assert "reward function score failed:" in result.output and "return trajectory.nothing" in result.output
    assert "failed:" not in agentrl("train", path, "--dry-run").output
    assert len(json.loads(agentrl("try", path, "--json").stdout)["tried"]) == 2
