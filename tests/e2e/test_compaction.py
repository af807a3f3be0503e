"""A run whose contexts are too small for its tasks: the policy summarises, and goes on in a new row."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from agentrl_algorithms.config import GRPOConfig
from agentrl_algorithms.grpo import GRPO
from agentrl_core.algorithms.outcome import advantage_input
from agentrl_core.api import AlgorithmContext, RewardResult, Termination
from agentrl_core.rollout.batching import to_data_proto
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.runs.records import read_rollouts
from agentrl_core.runs.run_dir import RunDir
from agentrl_loop_tool_agent.compacting import CompactingToolAgentLoop
from agentrl_loop_tool_agent.config import CompactingToolAgentConfig
from agentrl_testing.contracts.scripted_session import LoopRun, tool_call

CALL = json.dumps({"name": "calculator", "arguments": {"expression": "37 * 45"}})


def test_summaries_are_trained_and_the_run_counts_them(fit: Callable[..., RunDir], tiny_run: Any) -> None:
    # The scripted engine begins again in each row: a call, a summary, a call, and the last answer.
    turns = [f"<tool_call>\n{CALL}\n</tool_call>", "so far 1665"]
    options = {
        "compact_below": 300,
        "max_compactions": 1,
        "max_summary_tokens": 64,
        "summary_instruction": "Summarise.",
    }
    changes = {
        "data.max_prompt_length": 1000,
        "rollout.max_response_length": 330,
        "rollout.engine": {"name": "scripted", "config": {"turns": turns}},
        "rollout.tool_parser": {"name": "hermes"},
        "rollout.agent.loops": [{"name": "compacting_tool_agent", "config": options}],
        "tools": [{"name": "calculator"}],
        "trainer.steps": 2,
    }
    run = fit(changes, tiny_run.rows(4))
    for step, metrics in enumerate(run.read_metrics(), start=1):
        assert metrics["loop/compactions"] == 1 and metrics["loop/cut_summaries"] == 0
        rows = list(read_rollouts(run.rollout_file(step, "train")))
        assert len(rows) == 8 and {row.termination for row in rows} == {"completed"}
        assert all(any(row.response_mask) for row in rows)
        assert set(Counter(row.trajectory_id for row in rows).values()) == {2}
    assert step == 2


def rows_of(*turns: str) -> list[Any]:
    def look(word: str) -> str:
        """Looks a word up."""
        return f"about {word}"

    options = CompactingToolAgentConfig(compact_below=280, summary_instruction="Summarise.")
    world = LoopRun(
        lambda context: CompactingToolAgentLoop(options, context), turns, {"look": look}, max_response_length=330
    )
    return asyncio.run(world.trajectory([{"role": "user", "content": "What?"}]))


def test_both_rows_are_in_the_batch_with_one_vote() -> None:
    """The baseline of a group of three trajectories, one of them in two rows, is the mean of three scores."""
    two = rows_of(tool_call("look", {"word": "one"}), "One is known.", "It is 4.")
    one = rows_of("It is 4.")
    assert (len(two), len(one)) == (2, 1)
    results = [
        TrajectoryResult({"uid": "x"}, name, Termination.COMPLETED, outputs, RewardResult(score))
        for name, outputs, score in [("a", two, 3.0), ("b", one, 0.0), ("c", one, 0.0)]
    ]
    batch = to_data_proto(results, 0, {})
    assert list(batch.non_tensor_batch["trajectory_id"]) == ["a", "a", "b", "c"]
    assert bool(batch.batch["response_mask"].any(dim=1).all())
    advantages = GRPO(GRPOConfig(norm_by_std=False), AlgorithmContext(3))(advantage_input(batch)).advantages
    first = batch.batch["response_mask"].int().argmax(dim=1)
    assert advantages[range(4), first].tolist() == pytest.approx([2.0, 2.0, -1.0, -1.0])
