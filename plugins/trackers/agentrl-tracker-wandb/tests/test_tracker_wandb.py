"""Runs in W&B's offline files, read back as `wandb sync` reads them: a LevelDB log of wandb's protobuf records."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl_testing.contracts import TrackerCase, TrackerContract
from agentrl_testing.contracts.tracker import STEPS, TRAJECTORY
from agentrl_tracker_wandb.config import WandbConfig
from agentrl_tracker_wandb.plugin import TRACKER

BLOCK, HEADER = 32768, 7


def log_entries(data: bytes) -> Iterator[bytes]:
    """The entries of a LevelDB log, whose first seven bytes are wandb's mark."""
    position, parts = HEADER, bytearray()
    while position + HEADER <= len(data):
        if BLOCK - position % BLOCK < HEADER:
            position += BLOCK - position % BLOCK
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        if position + HEADER + length > len(data):
            return  # it is being written
        parts += data[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind in (1, 4):
            yield bytes(parts)
            parts.clear()


def records(run_dir: Path) -> Iterator[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    for file in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        # wandb's own process writes the file, and closes it after `finish` has returned.
        deadline, found = time.monotonic() + 30, []
        while not (found and found[-1].HasField("exit")) and time.monotonic() < deadline:
            found = list(map(Record.FromString, log_entries(file.read_bytes())))
        yield from found


def read(run_dir: Path) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for record in records(run_dir):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            found.setdefault(int(row["step"]), {}).update(row)
    return found


class TestWandb(TrackerContract):
    @pytest.fixture
    def plugin(self) -> TrackerCase:
        return TrackerCase(TRACKER, read=read)


def test_a_run_and_its_resumption_are_one_wandb_run(tmp_path: Path) -> None:
    case = TrackerCase(TRACKER, config=WandbConfig(project="calculator", tags=["tiny"], trajectories=1))
    first = case.make(tmp_path)
    first.log_trajectories([TRAJECTORY, TRAJECTORY], 1)
    first.log(STEPS[1], 1)
    first.finish("stopped")
    second = case.make(tmp_path, first_step=2)
    second.log(STEPS[2], 2)
    second.finish("failed")

    runs = [record.run for record in records(tmp_path) if record.WhichOneof("record_type") == "run"]
    assert {run.run_id for run in runs} == {(tmp_path / "run-id").read_text().strip()}
    assert {(run.project, run.display_name, *run.tags) for run in runs} == {("calculator", "contract", "tiny")}
    config = {item.key: json.loads(item.value_json) for run in runs for item in run.config.update}
    assert config["trainer"] == {"seed": 0}
    exits = [record.exit.exit_code for record in records(tmp_path) if record.WhichOneof("record_type") == "exit"]
    assert exits == [0, 1]
    (table,) = tmp_path.glob("wandb/offline-*/files/media/table/trajectories/train_*.json")
    content = json.loads(table.read_text())
    row = dict(zip(content["columns"], content["data"][0], strict=True))
    assert len(content["data"]) == 1 and row["reward"] == 1.0 and row["messages"].startswith("user: 2+3?\n\nassistant")


def test_a_dry_run_leaves_no_run_behind(tmp_path: Path) -> None:
    TrackerCase(TRACKER).make(tmp_path).finish("stopped")
    assert list(tmp_path.iterdir()) == []
