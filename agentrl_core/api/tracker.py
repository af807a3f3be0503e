"""The interface of trackers: where metrics go.

The factory ``(config, TrackerContext) -> Tracker`` is called once, when the run's directory is there; then ``log`` once
a step, steps ascending, and ``finish`` once, however the run ends. Everything runs in the trainer's process, in the
thread of ``Trainer.fit()``: a slow tracker makes the step slower, and one that talks to a network queues on a thread of
its own. Methods are plain ones, never coroutines. An exception is reported once and disables the tracker; the run
continues. Metrics are Python floats by name.

    class Memory(Tracker):
        def __init__(self, config, context):
            super().__init__(config, context)
            self.rows = []

        def log(self, metrics, step):
            self.rows.append((step, dict(metrics)))
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TrackerContext:
    """What a tracker gets when it is built.

    Args:
        run_name: ``trainer.name``.
        run_dir: the run's directory, which exists.
        total_steps: of the whole run.
        config: the resolved configuration as plain containers.
        first_step: the first step that this process will log; greater than 1 on resume.
    """

    run_name: str
    run_dir: Path
    total_steps: int
    config: Mapping[str, Any]
    first_step: int = 1


class Tracker(ABC):
    """Takes one flat dict of floats per step. A tracker that raises is reported once and disabled."""

    def __init__(self, config: Any, context: TrackerContext) -> None:
        self.config = config
        self.context = context

    @abstractmethod
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Metrics of one step. Step 0 is the validation before training."""

    def progress(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Something happens within a step; called often, never for every token.

        Args:
            phase: what has begun or goes on: ``rollout``, ``update_actor``, ``validation`` and so on, as in
                ``timing/<phase>``; empty while trajectories end.
            done, total: trajectories that have ended, and all of this rollout; 0 outside of rollouts.
        """
        return None

    def finish(self, status: str) -> None:
        """The run has ended: ``completed``, ``stopped`` or ``failed``. Called once."""
        return None
