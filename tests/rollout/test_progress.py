"""What the manager reports while trajectories run."""

import threading
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import WorkerError
from agentrl_core.config import load_config
from agentrl_core.data.rows import PromptBatch
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


def test_trajectories_of_calls_that_begin_together_all_count(make_rollout: Any, make_row: Any) -> None:
    """Groups that start one by one are one total; once all have ended, the count begins again."""
    rollout = make_rollout({})
    manager, heard = rollout.manager, list[tuple[int, int, int]]()

    def ended(results: list[Any]) -> None:
        heard.append((len(results), manager._done, manager._total))

    for _ in range(2):
        rows = [
            {**make_row(), "uid": f"p{prompt}", "prompt_index": prompt, "sample_index": sample}
            for prompt in range(5) for sample in range(2)
        ]  # fmt: skip
        results = manager.generate_sequences(PromptBatch(rows, 1, "train", {"temperature": 1.0}), ended)
        assert [result.row["uid"] for result in results] == [row["uid"] for row in rows]
        assert (manager._done, manager._total) == (10, 10)
    assert all(total == 10 and done <= 10 for _, done, total in heard)


def test_an_error_of_who_hears_of_groups_ends_the_others(make_rollout: Any, make_row: Any) -> None:
    rollout = make_rollout({"rollout.engine.config": {"delay": 0.001}, "rollout.agent.max_concurrent": 1})

    def ended(results: list[Any]) -> None:
        raise WorkerError("out of memory")

    rows = [{**make_row(), "uid": f"p{prompt}", "prompt_index": prompt, "sample_index": 0} for prompt in range(4)]
    with pytest.raises(WorkerError, match="out of memory"):
        rollout.manager.generate_sequences(PromptBatch(rows, 1, "train", {"temperature": 1.0}), ended)
    assert not any(rollout.manager._load.values())
