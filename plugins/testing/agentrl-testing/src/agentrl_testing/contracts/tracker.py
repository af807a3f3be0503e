"""The contract of trackers."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from agentrl_core.api import EndedTrajectory, Tracker, TrackerContext
from agentrl_testing.contracts.case import PluginCase, PluginContract

STEPS: list[dict[str, float]] = [
    {"validation/tiny/accuracy": 0.25},
    {"actor/loss": 0.5, "reward/mean": 0.0, "timing/step": 1.25},
    {"actor/loss": 0.25, "reward/mean": 1.0, "timing/step": 1.0, "validation/tiny/accuracy": 0.5},
    {"actor/loss": 0.125, "a metric that/was not there before": -1e30},
]
"""Step 0 is the validation before training; keys come and go."""

TRAJECTORY = EndedTrajectory(
    trajectory_id="step1-prompt0-sample0",
    uid="prompt0",
    split="train",
    data_source="tiny",
    termination="completed",
    reward=1.0,
    reward_metrics={"exact": 1.0},
    messages=[{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "\u2028 5 \U0001f600"}],
    num_turns=1,
    sampled_tokens=3,
    attempts=1,
    timings={"generate": 0.5, "total": 0.75},
    error=None,
)


@dataclass(kw_only=True)
class TrackerCase(PluginCase):
    """A tracker under test.

    Args:
        read: what was tracked, by step, from the run directory; None where it goes elsewhere.
    """

    read: Callable[[Path], Mapping[int, Mapping[str, float]]] | None = None

    def make(self, run_dir: Path, first_step: int = 1) -> Tracker:
        """A tracker as the trainer builds it."""
        tracker: Tracker = self.build(TrackerContext("contract", run_dir, 10, {"trainer": {"seed": 0}}, first_step))
        return tracker

    def check(self, run_dir: Path, expected: Mapping[int, Mapping[str, float]]) -> None:
        """What can be read back is what was logged."""
        if self.read is None:
            return
        found = self.read(run_dir)
        for step, metrics in expected.items():
            for name, value in metrics.items():
                got = found.get(step, {}).get(name)
                assert got is not None, f"step {step}: {name} was logged and cannot be read"
                assert math.isclose(got, value, rel_tol=1e-5), f"step {step}: {name} is {got}, logged was {value}"


class TrackerContract(PluginContract):
    """What every tracker must do: nothing that is logged is lost."""

    kind = "tracker"

    @pytest.mark.parametrize("status", ["completed", "stopped", "failed"])
    def test_all_steps_are_kept(self, plugin: TrackerCase, tmp_path: Path, status: str) -> None:
        """However the run ends, and although keys come and go."""
        tracker = plugin.make(tmp_path)
        for step, metrics in enumerate(STEPS):
            tracker.log(metrics, step)
        tracker.finish(status)
        plugin.check(tmp_path, dict(enumerate(STEPS)))

    def test_metrics_are_left_alone(self, plugin: TrackerCase, tmp_path: Path) -> None:
        """Every tracker gets the same dictionary."""
        tracker = plugin.make(tmp_path)
        for step, metrics in enumerate(STEPS):
            given = dict(metrics)
            tracker.log(given, step)
            assert given == metrics, f"log changed the metrics of step {step}"
        tracker.finish("completed")

    def test_a_resumed_run_goes_on(self, plugin: TrackerCase, tmp_path: Path) -> None:
        """A second process logs from a later step on, and the earlier steps stay."""
        first = plugin.make(tmp_path)
        first.log(STEPS[1], 1)
        first.finish("stopped")
        second = plugin.make(tmp_path, first_step=2)
        second.log(STEPS[2], 2)
        second.finish("completed")
        plugin.check(tmp_path, {1: STEPS[1], 2: STEPS[2]})

    def test_trajectories_are_taken(self, plugin: TrackerCase, tmp_path: Path) -> None:
        """They come before the metrics of their step, whatever a model or a dataset wrote, and failed ones too."""
        failed = replace(TRAJECTORY, termination="error", reward=None, messages=[], num_turns=0, error="no engine")
        odd = replace(TRAJECTORY, trajectory_id="odd", messages=[{"role": "user", "content": [{"type": "text"}]}])
        tracker = plugin.make(tmp_path)
        tracker.log_trajectories([TRAJECTORY, failed, odd], 1)
        tracker.log(STEPS[1], 1)
        tracker.log_trajectories([replace(TRAJECTORY, split="validation")], 2)
        tracker.log_trajectories([], 2)
        tracker.log(STEPS[2], 2)
        tracker.finish("completed")
        plugin.check(tmp_path, {1: STEPS[1], 2: STEPS[2]})

    def test_a_number_that_is_not_finite_is_taken(self, plugin: TrackerCase, tmp_path: Path) -> None:
        """A metric may have no value in some step; the run goes on."""
        tracker = plugin.make(tmp_path)
        tracker.log({"reward/mean": math.nan, "actor/loss": 1.0}, 1)
        tracker.finish("completed")
        plugin.check(tmp_path, {1: {"actor/loss": 1.0}})

    def test_a_run_without_steps_can_end(self, plugin: TrackerCase, tmp_path: Path) -> None:
        """It failed before the first one."""
        plugin.make(tmp_path).finish("failed")
