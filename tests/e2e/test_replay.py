"""``agentrl replay``: recorded trajectories with one part swapped."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentrl_core.cli.main import app
from agentrl_core.runs.records import read_rollouts
from agentrl_core.runs.run_dir import RunDir

CALL = '<tool_call>\n{"name": "shout", "arguments": {"text": "hi"}}\n</tool_call>'
TOOLS = '''
def shout(text: str) -> str:
    """Shouts."""
    return text.upper()
'''
QUIET = TOOLS.replace("upper", "lower")
REWARDS = """
def half(trajectory):
    return 0.5
"""


@pytest.fixture
def run(fit: Callable[..., RunDir], tiny_run: Any) -> RunDir:
    """Two prompts with two samples: a call, its answer, a last word."""
    (tiny_run.folder / "tools.py").write_text(TOOLS, encoding="utf-8")
    (tiny_run.folder / "more_rewards.py").write_text(REWARDS, encoding="utf-8")
    return fit(
        {
            "rollout.engine": {"name": "scripted", "config": {"turns": [CALL, "HI, they said"]}},
            "rollout.agent.loops": ["tool_agent"],
            "rollout.max_response_length": 400,
            "data.max_prompt_length": 800,
            "tools": [{"name": "./tools.py:shout", "isolation": "inline"}],
            "trainer.steps": 1,
        }
    )


def replay(run: RunDir, *changes: str) -> str:
    result = CliRunner().invoke(app, ["replay", str(run.path), *(part for each in changes for part in ("--set", each))])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_nothing_swapped_nothing_differs(run: RunDir) -> None:
    (record, *_) = read_rollouts(run.rollout_file(1, "train"))
    assert [call["response"] for call in record.tool_calls] == ["HI"]
    assert replay(run).startswith("4 trajectories, 0 differ mean reward")


def test_json_has_every_trajectory(run: RunDir) -> None:
    result = CliRunner().invoke(app, ["replay", str(run.path), "--set", "rollout.tool_parser=mistral", "--json"])
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert (content["left_out"], len(content["trajectories"])) == (0, 4)
    for each in content["trajectories"]:
        assert each["old"] != each["new"] and each["changes"].keys() >= {"calls", "tokens", "turns", "reward"}


def test_a_parser_that_reads_no_calls_leaves_turns_over(run: RunDir) -> None:
    output = replay(run, "rollout.tool_parser=mistral")
    assert "4 trajectories, 4 differ" in output
    assert "1 recorded ones were not asked for" in output
    assert 'calls shout({"text": "hi"}) -> none' in output


def test_a_changed_tool_shows_in_tokens_and_responses(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(QUIET, encoding="utf-8")
    output = replay(run)
    assert "4 trajectories, 4 differ: tokens 4, responses 4" in output
    assert "row 0 from token" in output


def test_a_changed_reward_shows_old_and_new(run: RunDir, tmp_path: Path) -> None:
    output = replay(run, f"reward.functions=[{{name: {tmp_path}/more_rewards.py:half, isolation: inline}}]")
    assert "4 trajectories, 4 differ: reward 4" in output and "-> 0.5" in output.rpartition("mean reward")[2]


def test_a_loop_that_asks_for_more_than_is_recorded_says_so(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(
        "from agentrl_core.api import AgentLoopBase, Termination\n\n\n"
        "class Thrice(AgentLoopBase):\n"
        '    capabilities = {"tools"}\n\n'
        "    async def run(self, sampling_params, *, session, raw_prompt, **row):\n"
        "        trajectory = session.trajectory(raw_prompt, tools=await session.open_tools())\n"
        "        for _ in range(3):\n"
        "            await trajectory.generate(sampling_params)\n"
        '            trajectory.add_messages([{"role": "user", "content": "more"}])\n'
        "        return trajectory.finish(Termination.COMPLETED)\n",
        encoding="utf-8",
    )
    output = replay(run, f"rollout.agent.loops=[{tmp_path}/twice.py:Thrice]")
    assert "turns more were asked for" in output and "completed -> engine_error" in output


DUEL = """
from agentrl_core.api import Environment, Episode, InteractionTurn


class Duel(Environment):
    def tasks(self, split):
        return [{}] * 4

    async def open(self, task, seed):
        return Game(seed)


class Game(Episode):
    agent = "white"

    def __init__(self, seed):
        self.said = []
        self.messages = [{"role": "user", "content": f"Game {seed}. You begin."}]

    async def reply(self, messages):
        self.said.append(messages[-1]["content"])
        other = ("black", "white")[len(self.said) % 2 == 0]
        return InteractionTurn(len(self.said) == 4, f"{self.said[-1]}, your turn", agent=other)

    async def score(self, trajectory):
        return float(len(trajectory.full_text))
"""


@pytest.fixture
def duel(fit: Callable[..., RunDir], tiny_run: Any) -> RunDir:
    """Two games with two samples each. Both agents call the tool in their first turn."""
    (tiny_run.folder / "tools.py").write_text(TOOLS, encoding="utf-8")
    (tiny_run.folder / "duel.py").write_text(DUEL, encoding="utf-8")
    return fit(
        {
            "data.train_files": None,
            "data.batch_size": 2,
            "data.max_prompt_length": 400,
            "environments": ["./duel.py:Duel"],
            "rollout.engine": {"name": "scripted", "config": {"turns": [CALL, "one", "two"]}},
            "rollout.agent.loops": ["multi_agent"],
            "rollout.max_response_length": 400,
            "reward.functions": [],
            "tools": [{"name": "./tools.py:shout", "isolation": "inline"}],
            "trainer.steps": 1,
        }
    )


def test_each_agents_calls_are_on_its_own_rows_and_replay_compares_them(duel: RunDir, tmp_path: Path) -> None:
    records = list(read_rollouts(duel.rollout_file(1, "train")))
    assert [record.agent for record in records] == ["white", "black"] * 4
    assert [[call["response"] for call in record.tool_calls] for record in records] == [["HI"]] * 8
    assert replay(duel).startswith("8 trajectories, 0 differ mean reward")
    (tmp_path / "tools.py").write_text(QUIET, encoding="utf-8")
    assert "8 trajectories, 8 differ: tokens 8, responses 8" in replay(duel)


def test_an_agent_that_does_not_act_now_is_named(duel: RunDir, tmp_path: Path) -> None:
    (tmp_path / "duel.py").write_text(DUEL.replace('"black", "white"', '"red", "white"'))
    output = replay(duel)
    assert "12 trajectories, 8 differ: turns 8" in output
    assert "the agent did not act now" in output and "a new agent acted" in output


def test_a_run_without_rollouts_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["replay", str(tmp_path / "none")])
    assert result.exit_code == 1 and "no such run directory" in " ".join(result.output.split())
