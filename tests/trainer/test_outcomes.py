"""What records keep of a trained batch, token by token."""

from typing import Any

import pytest
import torch

from agentrl_core.api import AgentLoopOutput, Termination
from agentrl_core.api.tree import Call, Node, Request, Tree, TreePath
from agentrl_core.rollout.batching import to_data_proto
from agentrl_core.rollout.loop_output import TreeRow, adopt
from agentrl_core.rollout.results import Span, TrajectoryResult
from agentrl_core.runs.records import RolloutRecord, records_of, to_json
from agentrl_core.trainer.outcomes import Credit, ended_trajectory, make_records


def result(name: str, *rows: list[int]) -> TrajectoryResult:
    outputs = [
        AgentLoopOutput([7], list(range(len(mask))), mask, [-0.5 * m for m in mask], Termination.COMPLETED, name)
        for mask in rows
    ]
    row = {"uid": name, "sample_index": 0}
    tree = Tree()
    rows = adopt("by hand", tree, outputs)
    waits = [Span("generate", 10.0, 0.5)]
    return TrajectoryResult(row, name, Termination.COMPLETED, rows, tree=tree, waits=waits)


def records(results: list[TrajectoryResult], **tensors: Any) -> list[RolloutRecord]:
    batch = to_data_proto(results, 0, {})
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
    for name, values in tensors.items():
        batch.batch[name] = torch.tensor(values)
    lines = make_records(1, "train", results, [Credit.of(batch)])
    return [row for line in lines for row in records_of(to_json(line))]


def test_columns_stand_in_the_row_of_their_tokens() -> None:
    both, short = records(
        [result("a", [1, 0, 1], [1])],
        advantages=[[0.25, 9.0, -0.75], [2.0, 9.0, 9.0]],
        old_log_probs=[[-0.1234567, 9.0, -0.5], [-1.0, 9.0, 9.0]],
    )
    assert (both.advantages, both.old_log_probs) == ([0.25, 0.0, -0.75], [-0.12346, 0.0, -0.5])
    assert (short.advantage, short.advantages, short.old_log_probs) == (2.0, [], [-1.0])
    assert both.advantage == pytest.approx(-0.25)
    assert both.spans == [["generate", 10.0, 0.5]]


def test_what_one_number_says_is_not_kept_for_every_token() -> None:
    (record,) = records([result("a", [1, 1, 0, 1])], advantages=[[0.5, 0.5, 0.0, 0.5]])
    assert (record.advantage, record.advantages, record.old_log_probs) == (0.5, [], [])


def test_rows_of_a_batch_that_a_hook_cut_are_not_guessed() -> None:
    results = [result("a", [1, 1], [1, 1])]
    batch = to_data_proto(results, 0, {})
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
    batch.batch["advantages"] = torch.ones(2, 2)
    (line,) = make_records(1, "train", results, [Credit.of(batch.select_idxs([1]))])
    assert [row.advantage for row in records_of(to_json(line))] == [None, None]


def test_an_advantage_that_is_nan_reads_back_as_none() -> None:
    nan = float("nan")
    all_nan, one = records([result("a", [1, 1], [1, 1])], advantages=[[nan, nan], [0.5, nan]])
    assert (all_nan.advantage, all_nan.advantages) == (None, [])
    assert (one.advantage, one.advantages) == (None, [0.5, None])


def test_a_turn_without_tokens_takes_part_in_no_credit() -> None:
    """An engine may abort before the first token, and the loop may go on."""
    made = result("a", [1, 0, 1])
    first, context = made.tree.nodes[1:3]
    empty = Node(first, "turn", [], log_probs=[], finish_reason="abort", request=Request(0, 0.0, 1.0, 0.5))
    context.parent = empty
    made.tree.nodes.insert(2, empty)
    made.outputs = adopt("loop", made.tree, TreeRow(TreePath(made.tree, made.tree.nodes[-1].path)))
    (record,) = records([made], advantages=[[0.25, 0.0, -0.75]])
    assert record.advantages == [0.25, 0.0, -0.75] and record.turn_ids == [0, -1, 2]


def test_hooks_get_the_tokens_before_each_turn() -> None:
    made = result("a", [1, 0, 1], [1, 1])
    for number, node in enumerate(made.turns):
        node.request = Request(0, 0.0, float(number), 0.5)
    made.waits = []
    assert ended_trajectory("train", made).turn_tokens == [(1, 1), (3, 1), (1, 2)]


def test_a_record_has_what_was_called_before_a_turn_that_never_came() -> None:
    made = result("a", [0])
    made.tree.early.calls.append(Call("look", {"x": 1}, "found", reward=0.5))
    made.outputs = []
    (record,) = [row for line in make_records(1, "train", [made]) for row in records_of(to_json(line))]
    assert record.tool_calls == [{"name": "look", "arguments": {"x": 1}, "response": "found", "failed": False}]
    assert (record.tool_rewards, record.tool_reward_names, record.tool_reward_turns) == ([0.5], ["look"], [0])
    assert sorted(span[0] for span in record.spans) == ["generate", "tools"]
