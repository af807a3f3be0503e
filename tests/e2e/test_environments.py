"""Runs on the tasks of environment plugins, end to end."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentrl_core.cli.main import app
from agentrl_core.runs.records import read_rollouts

EIGHT = (
    "basic_arithmetic", "chain_sum", "countdown", "gcd", "leg_counting", "letter_counting", "number_sorting",
    "spell_backward",
)  # fmt: skip


@pytest.mark.parametrize(
    ("names", "curriculum", "sampler"),
    [(("leg_counting", "countdown", "spell_backward"), False, "shuffle"), (EIGHT, True, "levels")],
)
def test_runs_train_on_mixtures(fit: Any, names: tuple[str, ...], curriculum: bool, sampler: str) -> None:
    run = fit({
        "environments": [{
            "name": "reasoning_gym",
            "config": {
                "datasets": {name: {"curriculum": curriculum} for name in names},
                "tasks": 64,
                "validation_tasks": 16,
            },
        }],
        "data.train_files": None,
        "data.sampler": {"name": sampler},
        "data.batch_size": 16,
        "data.max_prompt_length": 4000,
        "reward.functions": [],
        "rollout.engine": {"name": "scripted", "config": {"turns": ["<answer>2</answer>"]}},
        "rollout.max_response_length": 32,
        "trainer.validation.interval": 2,
        "trainer.steps": 2,
    })  # fmt: skip
    assert run.metrics_file.read_text().count('"reward/environment/answered": 1.0') == 2
    for name in names:
        assert f"validation/{name}/" in run.metrics_file.read_text()


def test_runs_train_on_text_games(fit: Any) -> None:
    run = fit({
        "environments": [{
            "name": "textarena",
            "config": {
                "games": {"GuessTheNumber-v0": {"config": {"max_turns": 2}}, "TowerOfHanoi-v0": {}},
                "tasks": 64,
                "validation_tasks": 8,
                "max_turns": 3,
            },
        }],
        "data.train_files": None,
        "data.batch_size": 8,
        "data.max_prompt_length": 2000,
        "reward.functions": [],
        "rollout.agent.loops": ["tool_agent"],
        "rollout.engine": {"name": "scripted", "config": {"turns": ["[3]", "[17]", "[A C]"]}},
        "rollout.max_response_length": 1500,
        "trainer.validation.interval": 2,
        "trainer.steps": 2,
    })  # fmt: skip
    metrics = run.metrics_file.read_text()
    assert metrics.count('"reward/environment/turns"') == 2
    for name in ("GuessTheNumber-v0", "TowerOfHanoi-v0"):
        assert f"validation/{name}/" in metrics


WORLD = """
from pydantic import BaseModel


class Action(BaseModel):
    word: str


class Observation(BaseModel):
    text: str
    done: bool = False
    reward: float | None = None


class World:
    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(text="Say yes.")

    def step(self, action: Action, timeout_s=None, **kwargs):
        return Observation(text="No.", done=action.word == "yes", reward=float(action.word == "yes"))
"""


def test_runs_train_on_a_class_with_the_interface_of_openenv(
    fit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "openenv_world.py").write_text(WORLD)
    monkeypatch.syspath_prepend(tmp_path)
    run = fit({
        "environments": [{
            "name": "openenv",
            "config": {"environment": "openenv_world:World", "text_field": "word", "tasks": 64},
        }],
        "data.train_files": None,
        "data.batch_size": 8,
        "reward.functions": [],
        "rollout.agent.loops": ["tool_agent"],
        "rollout.engine": {"name": "scripted", "config": {"turns": ["no", "yes"]}},
        "rollout.max_response_length": 200,
        "trainer.steps": 2,
    })  # fmt: skip
    metrics = run.metrics_file.read_text()
    assert metrics.count('"reward/environment": 1.0') == 2
    assert metrics.count('"reward/environment/steps": 2.0') == 2


def test_trajectories_go_through_traces_and_are_trained_to_the_token(fit: Any, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text('def shout(text: str) -> str:\n    """Shouts."""\n    return text.upper()\n')
    call = '<tool_call>\n{"name": "shout", "arguments": {"text": "hi"}}\n</tool_call>'
    run = fit({
        "rollout.engine": {"name": "scripted", "config": {"turns": [call, "HI, they said"]}},
        "rollout.agent.loops": ["tool_agent"],
        "rollout.max_response_length": 400,
        "data.max_prompt_length": 800,
        "tools": [{"name": "./tools.py:shout", "isolation": "inline"}],
        "trainer.steps": 1,
    })  # fmt: skip
    traces, rows = tmp_path / "traces.jsonl", tmp_path / "rows.jsonl"
    for command in (["write", run.rollout_file(1, "train"), traces], ["read", traces, rows]):
        result = CliRunner().invoke(app, ["openenv-trace", *map(str, command)])
        assert result.exit_code == 0, result.output
    again = fit({
        "data.train_files": [str(rows)],
        "data.batch_size": 4,
        "data.sampler": "sequential",
        "rollout.agent.loops": ["training_trace"],
        "rollout.n": 1,
        "rollout.max_response_length": 400,
        "algorithm": {"advantage": "reinforce_plus_plus", "loss": "sft"},
        "reward.functions": [],
        "trainer.name": "sft",
        "trainer.steps": 1,
    })  # fmt: skip
    recorded, played = (list(read_rollouts(each.rollout_file(1, "train"))) for each in (run, again))
    for name in ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "turn_ids", "reward", "segments"):
        assert [getattr(each, name) for each in played] == [getattr(each, name) for each in recorded], name
    assert again.read_metrics()[0]["actor/nll"] > 0


@pytest.mark.parametrize("retries", [0, 20])
def test_an_opponent_whose_engine_fails_costs_the_policy_nothing(fit: Any, tiny_model: Path, retries: int) -> None:
    """Every fifth request to the opponent fails, so some trajectories fail, and all succeed when they are retried."""
    run = fit({
        "environments": [{
            "name": "textarena",
            "config": {"games": {"TicTacToe-v0": {}}, "tasks": 16, "validation_tasks": 0, "opponent": "rival"},
        }],
        "engines": {"rival": {
            "name": "scripted",
            "model": str(tiny_model),
            "max_model_len": 4000,
            "config": {"turns": ["[8]"], "fail_every": 5},
        }},
        "data.train_files": None,
        "data.batch_size": 8,
        "data.max_prompt_length": 2000,
        "reward.functions": [],
        "rollout.agent.loops": ["tool_agent"],
        "rollout.engine": {"name": "scripted", "config": {"turns": ["[0]", "[3]", "[6]"]}},
        "rollout.max_response_length": 1500,
        "rollout.max_failed_fraction": 1.0,
        "rollout.retries": retries,
        "trainer.steps": 1,
    })  # fmt: skip
    records = list(read_rollouts(run.rollout_file(1, "train")))
    ends = Counter(record.termination.value for record in records)
    assert "env_error" not in ends and ends["completed"] > 0
    assert bool(ends["engine_error"] + ends["episode_error"]) == (retries == 0)
    metrics = run.read_metrics()[-1]
    assert metrics["rollout/failed_fraction"] == 1 - ends["completed"] / len(records)
