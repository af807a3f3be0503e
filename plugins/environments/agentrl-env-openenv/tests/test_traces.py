"""``agentrl openenv-trace``: against the schema of openenv 0.10.0, and against the package itself where
AGENTRL_OPENENV_PYTHON names a Python that has it."""

import gzip
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field
from typer.testing import CliRunner

from agentrl_env_openenv.cli import app

REAL = os.environ.get("AGENTRL_OPENENV_PYTHON")
CHECK = """
import sys
from openenv.core.harness.training import TrainingTrace
traces = [TrainingTrace.model_validate_json(line) for line in open(sys.argv[1])]
with open(sys.argv[2], "w") as file:
    file.writelines(trace.model_dump_json() + "\\n" for trace in traces)
"""


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class TrainingTurn(Strict):
    node_id: str = Field(min_length=1)
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    per_token_logps: list[float]
    loss_mask: list[int]
    request: dict[str, Any] = Field(default_factory=dict)
    response: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)


class TrainingTrace(Strict):
    schema_version: Literal[1] = 1
    turns: list[TrainingTurn]


ASKED, CALLED = {"role": "user", "content": "2*3?"}, {"role": "assistant", "content": "call"}
TOLD, SAID = {"role": "tool", "name": "calculator", "content": "6"}, {"role": "assistant", "content": "6"}
TWO_TURNS: dict[str, Any] = {
    "schema_version": 1,
    "trajectory_id": "train-000001-00000-00",
    "step": 1,
    "uid": "train-000001-00000",
    "data_source": "sums",
    "termination": "completed",
    "trained": True,
    "prompt_ids": [1, 2],
    "response_ids": [3, 4, 5, 6, 7],
    "response_mask": [1, 1, 0, 0, 1],
    "response_logprobs": [-0.5, 1e-9, 0.0, 0.0, -1.5],
    "turn_ids": [0, 0, -1, -1, 1],
    "messages": [ASKED, CALLED, TOLD, SAID],
    "tool_schemas": [{"type": "function", "function": {"name": "calculator"}}],
    "reward": 0.75,
}
TREE: dict[str, Any] = {
    "schema_version": 2,
    **{name: TWO_TURNS[name] for name in ("trajectory_id", "step", "data_source", "tool_schemas")},
    "waits": [],
    "timings": {},
    "nodes": [
        {"parent": None, "kind": "prompt", "ids": [1, 2], "text": "", "messages": [ASKED]},
        {"parent": 0, "kind": "turn", "ids": [3, 4], "text": "", "messages": [CALLED], "log_probs": [-0.5, 1e-9]},
        {"parent": 1, "kind": "context", "ids": [5, 6], "text": "", "messages": [TOLD]},
        {"parent": 2, "kind": "turn", "ids": [7], "text": "", "messages": [SAID], "log_probs": [-1.5]},
    ],
    "agents": [
        {
            **{name: TWO_TURNS[name] for name in ("trajectory_id", "uid", "termination", "reward")},
            "agent": "",
            "rows": [{"leaf": 3, "shared": 1, "trained": True}],
        }
    ],
}
"""The same in schema version 2."""
TURN: dict[str, Any] = {
    "node_id": "a", "prompt_token_ids": [1, 2], "completion_token_ids": [3], "per_token_logps": [-1.0],
    "loss_mask": [0, 0, 1],
}  # fmt: skip


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def convert(tmp_path: Path) -> Callable[..., Path]:
    """The file that a subcommand makes of these values; asserts what it prints, or its exit code."""

    def made(command: str, values: list[Any], printed: str = "", code: int = 0, suffix: str = ".jsonl") -> Path:
        source, output = tmp_path / f"source{suffix}", tmp_path / f"{command}.jsonl"
        output.unlink(missing_ok=True)
        text = "".join(json.dumps(value) + "\n" for value in values)
        source.write_bytes(gzip.compress(text.encode()) if suffix.endswith(".gz") else text.encode())
        result = CliRunner().invoke(app, [command, str(source), str(output)])
        shown = f"{result.output} {result.exception}"
        assert result.exit_code == code and printed in " ".join(shown.split()), shown
        assert output.exists() == (code == 0)
        return output

    return made


@pytest.mark.parametrize("record", [TWO_TURNS, TREE], ids=["version 1", "version 2"])
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_each_turn_of_the_policy_is_a_call_with_its_own_prompt(
    convert: Callable[..., Path], suffix: str, record: dict[str, Any]
) -> None:
    (trace,) = map(TrainingTrace.model_validate, lines(convert("write", [record], "1 traces; 0", suffix=suffix)))
    first, second = trace.turns
    assert (first.prompt_token_ids, first.completion_token_ids) == ([1, 2], [3, 4])
    assert (second.prompt_token_ids, second.completion_token_ids) == ([1, 2, 3, 4, 5, 6], [7])
    assert (first.loss_mask, second.loss_mask) == ([0, 0, 1, 1], [0] * 6 + [1])
    assert (first.per_token_logps, second.per_token_logps) == ([-0.5, 0.0], [-1.5])
    assert first.request == {"messages": [ASKED], "tools": TWO_TURNS["tool_schemas"]}
    assert second.request["messages"] == [ASKED, CALLED, TOLD]
    assert second.response == {"choices": [{"message": SAID}]}
    assert first.node_id != second.node_id and second.metadata["reward"] == 0.75


def test_turns_that_touch_are_told_apart(convert: Callable[..., Path]) -> None:
    record = {**TWO_TURNS, "response_mask": [1] * 5, "turn_ids": [0, 0, 0, 1, 1], "messages": [ASKED, CALLED, SAID]}
    (trace,) = lines(convert("write", [record]))
    assert [turn["completion_token_ids"] for turn in trace["turns"]] == [[3, 4, 5], [6, 7]]


def test_rows_of_one_trajectory_are_one_trace(convert: Callable[..., Path]) -> None:
    later = {**TWO_TURNS, "prompt_ids": [9], "response_ids": [8], "response_mask": [1], "response_logprobs": [-1.0],
             "turn_ids": [2], "messages": [ASKED, SAID]}  # fmt: skip
    (trace,) = lines(convert("write", [{**TWO_TURNS, "reward": None}, later]))
    assert [turn["prompt_token_ids"] for turn in trace["turns"]] == [[1, 2], [1, 2, 3, 4, 5, 6], [9]]
    assert len({turn["node_id"] for turn in trace["turns"]}) == 3
    assert trace["turns"][2]["request"]["messages"] == [ASKED]
    assert {turn["metadata"]["reward"] for turn in trace["turns"]} == {0.75}


def test_what_is_not_trained_is_left_out_or_masked(convert: Callable[..., Path]) -> None:
    failed = {**TWO_TURNS, "trajectory_id": "b", "termination": "engine_error"}
    empty = {**TWO_TURNS, "trajectory_id": "c", "response_mask": [0] * 5}
    opponent = {**TWO_TURNS, "trajectory_id": "d@guest", "trained": False}
    written = lines(convert("write", [failed, empty, opponent], "1 traces; 2 left out"))
    assert not any(any(turn["loss_mask"]) for turn in written[0]["turns"])


def test_a_trace_becomes_the_token_rows_that_it_was_written_from(convert: Callable[..., Path]) -> None:
    trace = convert("write", [TWO_TURNS])
    (row,) = lines(convert("read", lines(trace), "1 rows; 0"))
    assert row["token_rows"] == [
        {"prompt_ids": [1, 2], "response_ids": [3, 4, 5, 6, 7], "response_mask": [1, 1, 0, 0, 1],
         "response_logprobs": [-0.5, 0.0, 0.0, 0.0, -1.5]}
    ]  # fmt: skip
    assert (row["prompt"], row["data_source"], row["trace_reward"]) == ([ASKED], "sums", 0.75)


def test_a_prompt_that_was_rewritten_begins_a_new_token_row(convert: Callable[..., Path]) -> None:
    second = {**TURN, "node_id": "b", "prompt_token_ids": [1, 9]}
    partly = {**TURN, "node_id": "c", "prompt_token_ids": [1, 9, 3, 7], "completion_token_ids": [4, 5],
              "per_token_logps": [-1, -2.0], "loss_mask": [0, 0, 0, 0, 0, 1]}  # fmt: skip
    (row,) = lines(convert("read", [{"turns": [TURN, second, partly]}], suffix=".json"))
    assert [each["prompt_ids"] for each in row["token_rows"]] == [[1, 2], [1, 9]]
    assert row["token_rows"][1]["response_ids"] == [3, 7, 4, 5]
    assert row["token_rows"][1]["response_mask"] == [1, 0, 0, 1]
    assert (row["prompt"], row["trace_reward"]) == ("training_trace", None)


def test_a_trace_without_a_reward_can_be_given_one(tmp_path: Path) -> None:
    rewarded = {**TURN, "metadata": {"reward": -1.0}}
    (tmp_path / "traces.jsonl").write_text("".join(json.dumps({"turns": [turn]}) + "\n" for turn in (TURN, rewarded)))
    arguments = ["read", str(tmp_path / "traces.jsonl"), str(tmp_path / "rows.jsonl"), "--reward", "0.5"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert [row["trace_reward"] for row in lines(tmp_path / "rows.jsonl")] == [0.5, -1.0]


def test_a_trace_without_a_trained_token_gives_no_row(convert: Callable[..., Path]) -> None:
    assert lines(convert("read", [{"turns": [{**TURN, "loss_mask": [0, 0, 0]}]}], "0 rows; 1 left out")) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"loss_mask": [0, 1]},
            "source.jsonl:1: turn 0: 2 prompt and 1 completion tokens, but loss_mask has 2 entries",
        ),
        ({"loss_mask": [0, 1, 1]}, "loss_mask must be 0 on the prompt"),
        ({"loss_mask": [0, 0, 2]}, "0 or 1 on the completion"),
        ({"per_token_logps": []}, "per_token_logps 0"),
        ({"per_token_logps": [0.5]}, "finite numbers up to 0"),
        ({"prompt_token_ids": [True, 2]}, "prompt_token_ids must be a list of integers from 0"),
        ({"prompt_token_ids": [], "loss_mask": [1]}, "the prompt must not be empty"),
        ({"completion_token_ids": None}, "completion_token_ids must be a list"),
    ],
)
def test_turns_that_break_the_schema_are_refused(
    convert: Callable[..., Path], changed: dict[str, Any], message: str
) -> None:
    convert("read", [{"turns": [{**TURN, **changed}]}], message, code=1)


@pytest.mark.parametrize(
    ("command", "value", "message"),
    [
        ("read", {"turns": [], "schema_version": 2}, "no TrainingTrace of schema version 1"),
        ("read", [TURN], "no TrainingTrace"),
        ("read", {"turns": [3]}, "turn 0: is a int, not an object"),
        ("write", {"turns": []}, "no record of a trajectory; expected RUN/rollouts"),
        ("write", {**TWO_TURNS, "response_logprobs": None}, "train-000001-00000-00: has no log-probabilities"),
    ],
)
def test_other_files_are_refused(convert: Callable[..., Path], command: str, value: Any, message: str) -> None:
    convert(command, [value], message, code=1)


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("kept")
    result = CliRunner().invoke(app, ["read", str(tmp_path / "there"), str(tmp_path / "there")])
    assert result.exit_code == 2 and "nothing is overwritten" in " ".join(result.output.split())


@pytest.mark.skipif(REAL is None, reason="AGENTRL_OPENENV_PYTHON names no Python that has openenv")
def test_the_package_itself_reads_and_writes_these_files(convert: Callable[..., Path], tmp_path: Path) -> None:
    written, dumped = convert("write", [TWO_TURNS]), tmp_path / "dumped.jsonl"
    subprocess.run([str(REAL), "-c", CHECK, written, dumped], check=True, timeout=300)
    assert lines(convert("read", lines(dumped))) == lines(convert("read", lines(written)))


@pytest.mark.parametrize("record", [TWO_TURNS, TREE], ids=["rows", "tree"])
def test_trajectories_with_images_are_no_traces(record: Any, convert: Callable[..., Path]) -> None:
    image = {"type": "image", "image": "0" * 32 + "-4x3.png"}
    text = json.dumps(record).replace(json.dumps(ASKED["content"]), json.dumps([image]))
    convert("write", [json.loads(text)], "shows images, which a TrainingTrace cannot hold", code=1)
