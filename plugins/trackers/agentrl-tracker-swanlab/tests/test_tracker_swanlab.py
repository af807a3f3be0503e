"""Runs in SwanLab's offline files, read back with the reader of `swanlab sync`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl_testing.contracts import TrackerCase, TrackerContract
from agentrl_testing.contracts.tracker import STEPS, TRAJECTORY
from agentrl_tracker_swanlab.config import SwanlabConfig
from agentrl_tracker_swanlab.plugin import TRACKER

pytest.importorskip("swanlab", reason="not in requirements-dev.txt; the README says how to test it")


def records(run_dir: Path) -> Iterator[Any]:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    for file in sorted(run_dir.glob("swanlog/run-*/*.swanlab")):
        reader = DataStoreReader()
        reader.open(file)
        while (data := reader.scan()) is not None:
            yield Record.FromString(data)


def read(run_dir: Path) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for record in records(run_dir):
        if record.WhichOneof("record_type") == "scalar":
            found.setdefault(record.scalar.step, {})[record.scalar.key] = record.scalar.value.number
    return found


class TestSwanlab(TrackerContract):
    @pytest.fixture
    def plugin(self) -> TrackerCase:
        return TrackerCase(TRACKER, read=read)


def test_a_run_and_its_resumption_have_one_id(tmp_path: Path) -> None:
    case = TrackerCase(TRACKER, config=SwanlabConfig(project="calculator", trajectories=1))
    first = case.make(tmp_path)
    first.log_trajectories([TRAJECTORY, TRAJECTORY], 1)
    first.log(STEPS[1], 1)
    first.finish("stopped")
    second = case.make(tmp_path, first_step=2)
    second.log(STEPS[2], 2)
    second.finish("failed")

    starts = [record.start for record in records(tmp_path) if record.WhichOneof("record_type") == "start"]
    assert {(start.project, start.name, start.id) for start in starts} == {
        ("calculator", "contract", (tmp_path / "run-id").read_text()[:21])
    }
    (text,) = tmp_path.glob("swanlog/*/media/text/*.txt")
    assert "messages: user: 2+3?" in text.read_text()
    (media,) = [record.media for record in records(tmp_path) if record.WhichOneof("record_type") == "media"]
    assert (media.key, media.step) == ("trajectories/train", 1)
    ends = [record.finish.state for record in records(tmp_path) if record.WhichOneof("record_type") == "finish"]
    assert len(ends) == 2 and ends[0] != ends[1]


def test_a_dry_run_leaves_no_run_behind(tmp_path: Path) -> None:
    TrackerCase(TRACKER).make(tmp_path).finish("stopped")
    assert list(tmp_path.iterdir()) == []
