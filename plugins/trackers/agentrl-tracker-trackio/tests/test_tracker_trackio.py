"""Runs in Trackio's own files, read back with Trackio's API. It fixes its directory when it is imported."""

import os
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from agentrl_testing.contracts import TrackerCase, TrackerContract
from agentrl_testing.contracts.tracker import STEPS, TRAJECTORY
from agentrl_tracker_trackio.config import TrackioConfig
from agentrl_tracker_trackio.plugin import TRACKER


@pytest.fixture(autouse=True, scope="module")
def trackio_dir(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["TRACKIO_DIR"] = str(tmp_path_factory.mktemp("trackio"))


SESSION = uuid4().hex[:8]
"""Where another test has imported Trackio, its directory is the user's, with the projects of earlier sessions."""


def project_of(run_dir: Path) -> str:
    return f"{run_dir.name.replace('_', '-')}-{SESSION}"


def logged(run_dir: Path) -> list[dict[str, Any]]:
    from trackio.sqlite_storage import SQLiteStorage

    (name,) = SQLiteStorage.get_runs(project_of(run_dir))
    return list(SQLiteStorage.get_logs(project_of(run_dir), name))


def read(run_dir: Path) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for row in logged(run_dir):
        found.setdefault(row["step"], {}).update(row)
    return found


class TestTrackio(TrackerContract):
    @pytest.fixture
    def plugin(self, tmp_path: Path) -> TrackerCase:
        return TrackerCase(TRACKER, config=TrackioConfig(project=project_of(tmp_path)), read=read)


def test_a_run_and_its_resumption_are_one_trackio_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from trackio.sqlite_storage import SQLiteStorage

    case = TrackerCase(TRACKER, config=TrackioConfig(project=project_of(tmp_path), trajectories=1))
    first = case.make(tmp_path)
    first.log_trajectories([TRAJECTORY, TRAJECTORY], 1)
    first.log(STEPS[1], 1)
    first.finish("stopped")
    second = case.make(tmp_path, first_step=2)
    second.log(STEPS[2], 2)
    second.finish("failed")
    assert capsys.readouterr().out == ""

    (name,) = SQLiteStorage.get_runs(project_of(tmp_path))
    assert name == f"contract-{(tmp_path / 'run-id').read_text()[:8]}"
    assert SQLiteStorage.get_run_config(project_of(tmp_path), name)["trainer"] == {"seed": 0}
    (table,) = [row["trajectories/train"]["_value"] for row in logged(tmp_path) if "trajectories/train" in row]
    assert [row["messages"][:9] for row in table] == ["user: 2+3"]
    alerts = SQLiteStorage.get_alerts(project_of(tmp_path))
    assert {(alert["title"], alert["level"]) for alert in alerts} == {
        ("contract stopped", "info"),
        ("contract failed", "error"),
    }


def test_a_dry_run_leaves_no_run_behind(tmp_path: Path) -> None:
    TrackerCase(TRACKER).make(tmp_path).finish("stopped")
    assert list(tmp_path.iterdir()) == []
