"""Summaries of trajectories against the whole results, and what is told of trajectories that are lost."""

import logging
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl_core.api import RewardResult, Termination, WorkerError
from agentrl_core.api.agent_loop import AgentLoopOutput
from agentrl_core.api.engine import PolicySpan
from agentrl_core.api.tree import Call, Earned, Node, Request, Tree, paths_of
from agentrl_core.controller import LocalRuntime
from agentrl_core.rollout.batching import to_data_proto
from agentrl_core.rollout.loop_output import TreeRow, adopt
from agentrl_core.rollout.results import TrajectoryResult, by_agent, reward_trajectory
from agentrl_core.rollout.summaries import handed, summaries, whole
from agentrl_core.runs.records import read_rollouts
from agentrl_core.trainer.idle import activities
from agentrl_core.trainer.metrics import rollout_metrics
from agentrl_core.trainer.outcomes import ended_trajectory, make_records
from agentrl_core.trainer.record_writer import RecordWriter


@dataclass
class There:
    """Pickled, as it would be over there."""

    results: list[TrajectoryResult]
    is_lost: bool = False

    def get(self) -> Any:
        if self.is_lost:
            raise WorkerError("it is lost with the node that kept it")
        return pickle.loads(pickle.dumps(self.results))


def turn(parent: Node, ids: list[int], said: str, **fields: Any) -> Node:
    message = {"role": "assistant", "content": said}
    spans, request = [PolicySpan(3, 0, len(ids))], Request(1, 0.1, 1e9, 2.0)
    return Node(parent, "turn", ids, f"{said}<end>", (message,), "", [-0.5 * each for each in ids],
                spans, "stop", {"temperature": 1.0}, "<end>", request, **fields)  # fmt: skip


def results() -> list[TrajectoryResult]:
    """A branch, two agents, a row by hand and a failure."""
    made = []
    for number in range(4):
        prompt = Node(None, "prompt", [1, 2, number], "go", ({"role": "user", "content": "go"},))
        calls = [Call("search", {"query": "x"}, "found", reward=0.5, start=1e9, seconds=0.1)]
        first = turn(prompt, [5, 6], "look", calls=calls, rewards=[Earned("judge", 0.25, "interaction")])
        answer = Node(first, "context", [7, 8, 9], "found", ({"role": "tool", "content": "found"},))
        last, other = turn(answer, [3], f"done {number}"), turn(first, [4, 4], "other")
        tree = Tree.of(prompt, first, answer, last, other)
        rows = [TreeRow(path) for path in paths_of(tree, [last, other])]
        for row in rows:
            row.messages, row.turn_texts, row.full_text = row.tokens.leaf.conversation, ["look", "done"], "look done"
            row.agent, row.num_turns, row.termination = (
                ("b" if row is rows[1] and number > 1 else ""),
                2,
                Termination.COMPLETED,
            )
        given = {"uid": f"u{number % 2}", "prompt_index": number % 2, "sample_index": number // 2, "data_source": "d",
                 "raw_prompt": [], "reward_model": {"ground_truth": "42"}}  # fmt: skip
        result = TrajectoryResult(given, f"t{number}", Termination.COMPLETED, rows, RewardResult(number / 4), tree=tree)
        result.reward_input, result.tool_schemas = reward_trajectory(result), [{"name": "search"}]
        result.timings, result.metrics = {"total": number + 1.0}, {"tool_calls": 1.0}
        parts = by_agent(result)
        result.pack()
        for part in parts:
            part.pack()
        made += parts
    by_hand = AgentLoopOutput([1], [5, 6], [1, 0], [-0.5, 0.0], Termination.COMPLETED)
    tree = Tree()
    failed = {"uid": "u0", "prompt_index": 0, "sample_index": 9}
    made.append(TrajectoryResult(failed, "f", Termination.ENGINE_ERROR, [], error="died"))
    rows, given = adopt("by hand", tree, by_hand), failed | {"sample_index": 8}
    made.append(TrajectoryResult(given, "h", Termination.COMPLETED, rows, RewardResult(1.0), tree=tree))
    made[-1].pack()
    return made


def summarised(found: list[TrajectoryResult], **lost: bool) -> list[TrajectoryResult]:
    """As the driver gets them."""
    made, kept = pickle.loads(pickle.dumps(summaries(found))), There(found, **lost)
    for place, result in enumerate(made):
        result.kept, result.place = kept, place
    return list(made)


def lines(found: Any) -> list[Any]:
    return [pickle.loads(pickle.dumps(line)) for line in make_records(1, "train", found)]


def test_a_summary_says_what_the_driver_needs_and_has_no_texts() -> None:
    found = results()
    short = summarised(found)
    assert not any(word in pickle.dumps([replaced(each) for each in short]) for word in (b"look", b"found", b"query"))
    one, other = (to_data_proto(each, 0, {}) for each in (found, short))
    assert set(one.batch.keys()) == set(other.batch.keys())
    assert all(torch.equal(one.batch[name], other.batch[name]) for name in one.batch.keys())
    for name, column in one.non_tensor_batch.items():
        assert column.tolist() == other.non_tensor_batch[name].tolist(), name
    assert rollout_metrics(found, 5) == rollout_metrics(short, 5)
    assert activities(found) == activities(short)
    assert [each.reward_input and each.reward_input.last_text for each in found] == [
        each.reward_input and each.reward_input.last_text for each in short
    ]


def replaced(result: TrajectoryResult) -> dict[str, Any]:
    """What is left but for the way back, and the last text."""
    return {name: value for name, value in vars(result).items() if name not in ("kept", "reward_input")}


def test_whoever_asks_gets_the_whole_trajectory_as_the_driver_decided() -> None:
    found = results()
    short = summarised(found)
    short[0].reward, short[1].replaced = RewardResult(9.0), True
    short[2].reward, short[2].termination, short[2].error = None, Termination.REWARD_ERROR, "no"
    sent = pickle.loads(pickle.dumps(handed(short)))
    expected = results()
    expected[0].reward, expected[1].replaced = RewardResult(9.0), True
    expected[2].reward, expected[2].termination, expected[2].error = None, Termination.REWARD_ERROR, "no"
    assert lines(whole(sent)) == lines(expected)
    assert [ended_trajectory("train", each) for each in whole(handed(short))] == [
        ended_trajectory("train", each) for each in expected
    ]


def test_nothing_is_copied_where_everything_is_in_one_process() -> None:
    found = results()
    assert all(one is other for one, other in zip(whole(handed(found)), found, strict=True))


def test_a_lost_trajectory_is_named_and_costs_its_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = summarised(results(), is_lost=True)
    with pytest.raises(WorkerError, match=r"trajectory t0: it is lost with the node"):
        list(whole(handed(found)))
    others = results()
    for number, each in enumerate(others):
        each.trajectory_id = f"there {number}"
    with LocalRuntime() as runtime, caplog.at_level(logging.WARNING):
        RecordWriter(runtime, tmp_path, "all").write(1, "train", [*found, *others])
    assert {record.trajectory_id for record in read_rollouts(tmp_path / "step-000001.jsonl")} == {
        each.trajectory_id for each in others
    }
    assert f"{len(found)} trajectories of step 1 (train) have no record" in caplog.text and "t0, t1" in caplog.text
