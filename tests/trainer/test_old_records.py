"""Files of schema version 1, which an older agentrl wrote (``tests/runs/v1``): they say what a run says today."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentrl_core.api import RewardTrajectory
from agentrl_core.runs.records import RolloutRecord, read_rollouts, reward_trajectory_of
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.runs.trajectory_view import show_trajectory
from agentrl_testing.devtools.replay import replay_reward
from tests.trainer.test_agents import duel

__all__ = ["duel"]
OLD = Path(__file__).parents[1] / "runs" / "v1"
NEW = {"schema_version", "timings", "spans", "served", "status", "reason"}
"""What is another number in each run, or what only the new file has."""
COMPUTED = {"advantage", "advantages", "old_log_probs"}
"""Kept to five decimals; the last one depends on how rows are packed."""
BRANCHES = '''
from agentrl_core.api import AgentLoopBase, Termination, ToolCall


class Branches(AgentLoopBase):
    """A turn that calls a tool, and two branches after it."""

    capabilities = frozenset({"tools"})

    async def run(self, sampling_params, *, session, raw_prompt, **row):
        trajectory = session.trajectory(raw_prompt, tools=await session.open_tools())
        turn = await trajectory.generate(sampling_params)
        branch = trajectory.fork()
        outcome = await session.call_tool(ToolCall("look", {"word": "left"}, "", turn.tool_calls[0].turn))
        trajectory.add_messages([outcome.message])
        branch.add_messages([{"role": "user", "content": "right"}])
        await trajectory.generate(sampling_params)
        await branch.generate(sampling_params)
        return [trajectory.finish(Termination.COMPLETED), branch.finish(Termination.COMPLETED)]


def look(word: str) -> str:
    """Looks a word up.

    Args:
        word: a word.
    """
    return f"about {word}"
'''


@pytest.fixture
def branches(fit: Callable[..., RunDir], tiny_run: Any) -> RunDir:
    (tiny_run.folder / "b.py").write_text(BRANCHES)
    call = '<tool_call>\n{"name": "look", "arguments": {"word": "x"}}\n</tool_call>'
    return fit({
        "rollout.engine": {"name": "scripted", "config": {"turns": [call, "two three", "four five"]}},
        "rollout.agent": {"loops": ["./b.py:Branches"], "num_workers": 1},
        "tools": ["./b.py:look"],
        "data.max_prompt_length": 400,
        "rollout.max_response_length": 500,
        "data.batch_size": 1,
        "rollout.n": 2,
        "trainer.steps": 1,
    })  # fmt: skip


def same(old: list[RolloutRecord], new: list[RolloutRecord]) -> None:
    assert len(old) == len(new)
    for before, after in zip(old, new, strict=True):
        left, right = before.content, after.content
        for name in left.keys() - NEW:
            assert right[name] == (pytest.approx(left[name], abs=1.5e-5) if name in COMPUTED else left[name]), name
        assert sorted(span[0] for span in before.spans) == sorted(span[0] for span in after.spans)
        assert reward_trajectory_of(before) == reward_trajectory_of(after)


def test_two_branches(branches: RunDir) -> None:
    same(list(read_rollouts(OLD / "branches.jsonl")), list(read_rollouts(branches.rollout_file(1, "train"))))


def test_two_agents_in_an_environment(duel: Callable[..., RunDir]) -> None:
    run = duel(**{"algorithm.old_log_probs": "actor"})
    same(list(read_rollouts(OLD / "duel.jsonl")), list(read_rollouts(run.rollout_file(1, "train")))[:4])


def test_an_old_file_is_shown_and_scored_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), width=200)
    for record in read_rollouts(OLD / "branches.jsonl"):
        show_trajectory(record, console)
    assert "look(word=left) → about left" in console.file.getvalue()  # type: ignore[attr-defined]
    (tmp_path / "length.py").write_text("def length(trajectory):\n    return float(trajectory.sampled_tokens)\n")
    monkeypatch.chdir(tmp_path)
    found = replay_reward(OLD / "branches.jsonl", "./length.py:length", None)
    seen = [reward_trajectory_of(record) for record in read_rollouts(OLD / "branches.jsonl")]
    tokens = [trajectory.sampled_tokens for trajectory in seen if isinstance(trajectory, RewardTrajectory)]
    assert [each.new for each in found.trajectories] == [float(count) for count in tokens] and len(tokens) == 2
