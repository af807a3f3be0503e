"""Runs in MLflow's SQLite store, read back with MLflow's client."""

import shutil
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow import MlflowClient

from agentrl_testing.contracts import TrackerCase, TrackerContract
from agentrl_testing.contracts.tracker import STEPS, TRAJECTORY
from agentrl_tracker_mlflow.config import MlflowConfig
from agentrl_tracker_mlflow.plugin import TRACKER


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creating MLflow's tables takes seconds."""
    store = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{store}").search_experiments()
    return store


@pytest.fixture
def run_dir(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def runs_of(run_dir: Path, experiment: str = "agentrl") -> tuple[Any, list[Any]]:
    client = MlflowClient(tracking_uri=f"sqlite:///{run_dir.parent / 'mlflow.db'}")
    found = client.get_experiment_by_name(experiment)
    return client, list(client.search_runs([found.experiment_id])) if found else []


def read(run_dir: Path) -> dict[int, dict[str, float]]:
    client, (run,) = runs_of(run_dir)
    found: dict[int, dict[str, float]] = {}
    for name in run.data.metrics:
        for point in client.get_metric_history(run.info.run_id, name):
            found.setdefault(point.step, {})[name] = point.value
    return found


class TestMlflow(TrackerContract):
    @pytest.fixture
    def plugin(self) -> TrackerCase:
        return TrackerCase(TRACKER, read=read)

    @pytest.fixture
    def tmp_path(self, run_dir: Path) -> Path:
        return run_dir


def test_a_run_and_its_resumption_are_one_mlflow_run(run_dir: Path) -> None:
    case = TrackerCase(TRACKER, config=MlflowConfig(experiment="calculator", trajectories=1))
    first = case.make(run_dir)
    first.log_trajectories([TRAJECTORY, TRAJECTORY], 1)
    first.log({**STEPS[1], "reward/a+b=c": 1.0}, 1)
    first.finish("stopped")
    (run,) = runs_of(run_dir, "calculator")[1]
    assert run.info.status == "KILLED" and run.info.run_name == "contract"
    assert run.data.params == {"trainer.seed": "0"} and run.data.metrics["reward/a_b_c"] == 1.0
    second = case.make(run_dir, first_step=2)
    second.log(STEPS[2], 2)
    second.finish("failed")
    client, (run,) = runs_of(run_dir, "calculator")
    assert run.info.status == "FAILED" and run.data.tags["agentrl.status"] == "failed"
    assert run.data.metrics["validation/tiny/accuracy"] == 0.5

    folder = client.download_artifacts(run.info.run_id, "trajectories", str(run_dir))
    (table,) = Path(folder).iterdir()
    assert table.name == "train-000001.json" and '"user: 2+3?' in table.read_text()


def test_a_dry_run_leaves_no_run_behind(run_dir: Path) -> None:
    TrackerCase(TRACKER).make(run_dir).finish("stopped")
    assert runs_of(run_dir)[1] == [] and mlflow.active_run() is None
