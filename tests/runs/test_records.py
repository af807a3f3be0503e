"""Rollout records: what is written is read again, whatever a model wrote."""

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl_core.api import ToolCall
from agentrl_core.api.errors import DataError
from agentrl_core.api.tree import Node
from agentrl_core.runs.records import RolloutRecord, RolloutWriter, read_rollouts, records_of, to_json


def record(**changes: Any) -> RolloutRecord:
    values: dict[str, Any] = {
        "step": 10, "split": "train", "uid": "p1", "trajectory_id": "p1-0", "prompt_ids": [1, 2],
        "response_ids": [3, 4, 5], "response_mask": [1, 0, 1],
    }  # fmt: skip
    return RolloutRecord(**{**values, **changes})


anything = st.text(st.characters(codec=None, exclude_categories=()))  # lone surrogates and control characters too
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | anything,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(anything, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    text=anything, truth=json_values, arguments=st.dictionaries(anything, json_values, max_size=3),
    reward=st.none() | st.floats(-10, 10),
)  # fmt: skip
def test_a_record_survives_the_file(
    tmp_path_factory: pytest.TempPathFactory, text: str, truth: Any, arguments: dict[str, Any], reward: float | None
) -> None:
    written = record(
        segments=[(1, text), (0, "\n")], ground_truth=truth, reward=reward, prompt_text=text,
        tool_calls=[{"name": text, "arguments": arguments, "response": text, "failed": False}],
    )  # fmt: skip
    path = RolloutWriter(tmp_path_factory.mktemp("rollouts")).write(10, "train", [written.content, written.content])
    assert list(read_rollouts(path)) == [written, written]


def test_arrays_and_nan_become_strict_json() -> None:
    line = to_json(record(
        ground_truth=np.array([1, 2]), reward=float("nan"), reward_metrics={"a": np.float32(0.5)},
        response_logprobs=[-0.5, float("-inf"), 0.0], messages=[{"role": "user", "content": Path("x")}],
    ).content)  # fmt: skip
    content = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert content["ground_truth"] == [1, 2]
    assert content["reward"] is None
    assert content["reward_metrics"] == {"a": 0.5}
    assert content["response_logprobs"] == [-0.5, None, 0.0]
    assert content["messages"] == [{"role": "user", "content": "x"}]


def test_text_of_any_language_stays_readable_in_the_file() -> None:
    assert "答え é" in to_json(record(prompt_text="答え é").content)


def test_writer_names_files_by_step_and_split(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path / "rollouts")
    assert writer.write(10, "train", [record().content]).name == "step-000010.jsonl"
    assert writer.write(0, "validation", [record().content]).name == "validation-step-000000.jsonl"
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == [
        "step-000010.jsonl", "validation-step-000000.jsonl",
    ]  # fmt: skip


def test_writer_leaves_files_alone_that_are_not_its_own(tmp_path: Path) -> None:
    for name in ("step-final.jsonl", "copy-of-step-000001.jsonl", "step-1.jsonl"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "step-000002.jsonl").mkdir()
    before = {entry.name for entry in tmp_path.iterdir()}
    RolloutWriter(tmp_path).write(20, "train", [record().content])
    assert {entry.name for entry in tmp_path.iterdir()} == {*before, "step-000020.jsonl"}


def test_a_file_that_cannot_be_compressed_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Any, target: Any) -> None:
        target.write(source.read(9))
        raise OSError(28, "No space left on device")

    writer = RolloutWriter(tmp_path)
    writer.write(1, "train", [record().content])
    monkeypatch.setattr("agentrl_core.runs.records.shutil.copyfileobj", full)
    with pytest.raises(OSError, match="No space left on device: .*step-000001.jsonl.gz"):
        writer.write(20, "train", [record().content])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-000001.jsonl", "step-000020.jsonl"]


def test_writer_leaves_the_old_file_whole_if_a_record_fails(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path)
    path = writer.write(1, "train", [record().content])
    before = path.read_bytes()

    def broken() -> Any:
        yield record().content
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError):
        writer.write(1, "train", broken())
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[]", "JSON object, found list"),
        (
            '{"schema_version": 3}',
            "schema version 3; this agentrl reads 1 and 2. Read it with the agentrl that wrote it",
        ),
        ('{"schema_version": 2}', "a rollout record that is damaged: KeyError: 'nodes'"),
        (
            '{"schema_version": 2, "nodes": [{"parent": 0, "kind": "prompt"}]}',
            "node 0 has the parent 0; a parent stands",
        ),
        (
            '{"schema_version": 2, "nodes": [{"parent": null, "kind": "turn", "ids": 5, "text": ""}], "agents": [{}]}',
            "damaged: KeyError",
        ),
        ('{"schema_version": 1, "step": 1}', "without split, uid, trajectory_id, prompt_ids"),
    ],
)
def test_a_broken_line_is_named_with_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "step-000001.jsonl"
    path.write_text(to_json(record().content) + "\n" + line + "\n")
    with pytest.raises(DataError, match=rf"step-000001.jsonl:2: .*{message}"):
        list(read_rollouts(path))


def test_keys_of_a_newer_writer_are_passed_over() -> None:
    newer = {**json.loads(to_json(record().content)), "colour": "blue"}
    assert records_of(json.dumps(newer)) == [record()]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("response_mask", 5), ("prompt_ids", "abc"), ("prompt_ids", ["a"]), ("tool_calls", 5), ("tool_calls", [{}]),
        ("tool_calls", [{"name": "f", "response": "x", "arguments": [1]}]), ("timings", [1]), ("uid", {"a": 1}),
        ("reward_metrics", {"a": "b"}), ("reward", 10**400), ("tool_rewards", [10**400]), ("split", "other"),
        ("prompt_text", None), ("reward_input", 5), ("spans", [[1]]), ("advantage", "x"), ("sample", None),
    ],
    ids=lambda value: repr(value)[:20],
)  # fmt: skip
def test_a_field_of_a_wrong_type_is_a_data_error(name: str, value: Any) -> None:
    whole = json.loads(to_json(RolloutRecord(
        step=1, split="train", uid="u", trajectory_id="t", prompt_ids=[1], response_ids=[2], response_mask=[1],
        response_logprobs=[math.nan], reward=1.0,
    ).content))  # fmt: skip
    assert records_of(json.dumps(whole))[0].response_logprobs == [None]
    with pytest.raises(DataError, match=f"a rollout record whose {name} is|with the tool call"):
        records_of(json.dumps(whole | {name: value}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "image"}, "node 1 is of the kind 'image'; allowed are prompt, turn, context"),
        ({"spans": [[7, 0, 10**12]]}, "the spans of node 1 do not cover its 2 ids"),
        ({"spans": [[7, 0, 10**12], [7, 10**12, 2]]}, "the spans of node 1 do not cover its 2 ids"),
        ({"parent": 1}, "node 1 has the parent 1; a parent stands before its children"),
        ({"request": {"replica": 0, "wait": 0.0, "start": 10**400, "seconds": 0.5}}, "OverflowError"),
    ],
)
def test_a_damaged_node_is_a_data_error(changes: dict[str, Any], message: str) -> None:
    turn = {"parent": 0, "kind": "turn", "ids": [1, 2], "text": "ab", "log_probs": [-0.5, -0.5]}
    turn |= {"spans": [[7, 0, 2]], "request": None, "calls": [], "rewards": []}
    row = {"leaf": 1, "shared": 1, "trained": True, "num_turns": 2}
    line = {
        "schema_version": 2, "step": 1, "split": "train", "trajectory_id": "t", "timings": {}, "waits": [],
        "nodes": [{"parent": None, "kind": "prompt", "ids": [3], "text": "q"}, turn],
        "agents": [{"agent": "", "trajectory_id": "t", "uid": "u", "reward_input": None, "rows": [row]}],
    }  # fmt: skip
    (good,) = records_of(json.dumps(line))
    assert good.policy_versions == [7, 7]
    line["nodes"][1] = turn | changes
    with pytest.raises(DataError, match=re.escape(message)):
        records_of(json.dumps(line))


def test_a_tool_call_in_a_record_does_not_hold_its_trajectory() -> None:
    node = None
    for _ in range(2000):
        node = Node(node, "turn", [1])
    line = to_json({"extra_fields": {"calls": [ToolCall("f", {"x": 1}, "call00001", node)]}})
    assert json.loads(line) == {"extra_fields": {"calls": [{"name": "f", "arguments": {"x": 1}, "id": "call00001"}]}}


def test_an_object_of_a_loop_keeps_the_fields_that_its_repr_hides() -> None:
    @dataclass
    class Found:
        shown: int = 1
        hidden: int = field(default=2, repr=False)

    assert json.loads(to_json({"extra_fields": {"found": Found()}})) == {
        "extra_fields": {"found": {"shown": 1, "hidden": 2}}
    }
