"""A run with every tracker of requirements-dev.txt at once, offline, and its resumption."""

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.runs.run_dir import RunDir


@pytest.mark.slow
def test_a_run_and_its_resumption_with_all_trackers(
    fit: Callable[..., RunDir], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Trackio reads it once, when it is imported.
    os.environ.setdefault("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    # Where trackio was imported before, its directory is that of all sessions.
    project = f"{tmp_path.name.replace('_', '-')}-{uuid.uuid4().hex}"
    trackers: list[Any] = ["console", "jsonl", "tensorboard", "curve", "wandb", "mlflow", "otel"]
    trackers += [{"name": "trackio", "config": {"project": project}}]
    for steps in (1, 2):
        changes = {"trainer.trackers": trackers, "trainer.steps": steps, "trainer.resume": "auto"}
        run = fit({"rollout.engine": {"name": "scripted"}, **changes})
    assert "is disabled" not in caplog.text
    rewards = {row["step"]: row["reward/mean"] for row in run.read_metrics()}
    assert list(rewards) == [1, 2] and (run.path / "curve.png").exists()
    assert len(list(run.path.glob("wandb/offline-run-*/*.wandb"))) == 2

    spans = (run.path / "traces.jsonl").read_text()
    assert spans.count('"name": "step"') == 2 and '"name": "rollout"' in spans and '"name": "invoke_agent"' in spans

    from mlflow import MlflowClient
    from trackio.sqlite_storage import SQLiteStorage

    client = MlflowClient(tracking_uri=f"sqlite:///{run.path.parent / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("agentrl").experiment_id])
    points = client.get_metric_history(found.info.run_id, "reward/mean")
    assert {point.step: point.value for point in points} == rewards and found.info.status == "FINISHED"
    (name,) = SQLiteStorage.get_runs(project)
    rows = SQLiteStorage.get_logs(project, name)
    assert {row["step"]: row["reward/mean"] for row in rows if "reward/mean" in row} == rewards
    assert sum("trajectories/train" in row for row in rows) == 2
