"""What the manager reports while trajectories run."""

import threading
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.config import load_config
from agentrl_core.trainer import Trainer


def test_a_report_that_does_not_return_holds_up_no_trajectory(tiny_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracker may be busy with the step before while the next trajectories run."""
    released, reported = threading.Event(), threading.Event()

    def blocks(trackers: object, phase: str, done: int = 0, total: int = 0) -> None:
        if total and threading.current_thread() is not threading.main_thread():
            reported.set()
            released.wait()

    monkeypatch.setattr("agentrl_core.trainer.trackers.Trackers.progress", blocks)
    engine = {"name": "scripted", "health_interval": 0.01, "config": {"delay": 0.05}}
    try:
        path: Path = Trainer(load_config(tiny_run({"rollout.engine": engine}))).fit()
    finally:
        released.set()
    assert reported.is_set() and (path / "checkpoints" / "latest").exists()
