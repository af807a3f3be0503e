"""Runs whose gradients are not finite."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import WorkerError
from agentrl_core.runs.run_dir import RunDir

Fit = Callable[..., RunDir]
REWARD = """
def huge(trajectory):
    \"\"\"Too large for a gradient in float32, except in every third step.\"\"\"
    return (1.0 if trajectory.extra_info["index"] > 3 else 1e30) * sum(map(ord, trajectory.model_text))
"""
HUGE: dict[str, Any] = {
    "data.sampler": "sequential",
    "reward.functions": [{"name": "./huge.py:huge", "isolation": "inline"}],
    # Not divided by the standard deviation of the group.
    "algorithm.advantage": {"name": "rloo"},
}


@pytest.fixture
def huge(fit: Fit, tmp_path: Path) -> Callable[..., RunDir]:
    def run(**changes: Any) -> RunDir:
        (tmp_path / "huge.py").write_text(REWARD)
        return fit({**HUGE, **changes})

    return run


def test_a_run_stops_after_updates_without_a_finite_gradient(huge: Any, tmp_path: Path, caplog: Any) -> None:
    with pytest.raises(WorkerError) as caught:
        huge(**{"trainer.steps": 9, "actor.max_skipped_updates": 2})
    message = str(caught.value)
    assert message.startswith("step 2: the actor's weights did not change") and "reward/max" in message
    assert "update number 2 in a row; actor.max_skipped_updates=2" in message
    assert [each.levelname for each in caplog.records if "weights did not change" in each.getMessage()] == ["WARNING"]
    (file,) = tmp_path.glob("runs/*/metrics.jsonl")
    (step,) = [row for row in map(json.loads, file.read_text().splitlines()) if row["step"] == 1]
    assert step["actor/skipped_steps"] == 1 and "actor/grad_norm" not in step


def test_only_updates_in_a_row_count_and_the_steps_between_train(huge: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    run = huge(**{"trainer.steps": 5, "actor.max_skipped_updates": 3, "actor.mini_batches": 2})
    steps = [row for row in run.read_metrics() if row["step"]]
    assert [row["actor/skipped_steps"] for row in steps] == [2, 2, 0, 2, 2]
    assert ["actor/grad_norm" in row for row in steps] == [False, False, True, False, False]
    assert caplog.text.count("gradients of all its 2 optimizer steps were infinite or NaN") == 2
