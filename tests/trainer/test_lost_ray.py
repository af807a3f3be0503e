"""A run whose Ray dies: Ray then ends the process without a word to Python."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.hosting.processes import family
from agentrl_core.runs.run_dir import RunDir

pytestmark = pytest.mark.ray


def test_a_run_whose_ray_was_killed_has_failed_and_is_not_left_running(
    tiny_run: Any, start_agentrl: Callable[..., Any]
) -> None:
    tiny_run({"cluster.runtime": "ray", "trainer.steps": 3, "hooks": ["./hooks.py:Pause"]})
    started = start_agentrl("train", "config.yaml", TINY_PAUSE_AT="1")
    started.read_until("paused at step 1")
    names = {Path(f"/proc/{each}/comm").read_text().strip(): each for each in family(started.process.pid)}
    os.kill(names["raylet"], signal.SIGKILL)
    started.read_until("Ray's raylet died: the run ends here")
    state = RunDir(tiny_run.folder / "runs" / "tiny").read_state()
    assert state is not None and (state.status, state.step) == ("failed", 0)
