"""A run of Weights & Biases."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from agentrl_core.api import EndedTrajectory, Tracker, TrackerContext, trajectory_table
from agentrl_tracker_wandb.config import WandbConfig


class WandbTracker(Tracker):
    """Logs to a W&B run that starts with the first step, so that a dry run leaves none behind.

    A resumed run continues the same W&B run. ``step`` is a metric and the x axis of all others, because W&B drops
    what is logged for a step of its own that is over, such as one that a resumed run repeats.
    """

    config: WandbConfig

    def __init__(self, config: WandbConfig, context: TrackerContext) -> None:
        super().__init__(config, context)
        self._run: Any = None
        self._tables: dict[str, Any] = {}

    def _started(self) -> Any:
        if self._run is None:
            self._run = wandb.init(
                project=self.config.project,
                entity=self.config.entity,
                group=self.config.group,
                tags=self.config.tags or None,
                name=self.context.run_name,
                id=self.context.run_id,
                resume="allow",
                mode=self.config.mode,
                dir=str(self.context.run_dir),
                config=dict(self.context.config),
                settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
            )
            self._run.define_metric("*", step_metric="step")
        return self._run

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._started().log({**metrics, **self._tables, "step": step})
        self._tables = {}

    def log_trajectories(self, trajectories: Sequence[EndedTrajectory], step: int) -> None:
        # Logged with the metrics of the step, as one row of W&B's history.
        for split, (columns, rows) in trajectory_table(trajectories, step, self.config.trajectories).items():
            numbers = [[math.nan if cell is None else cell for cell in row] for row in rows]
            self._tables[f"trajectories/{split}"] = wandb.Table(columns=columns, data=numbers)

    def finish(self, status: str) -> None:
        if self._run is not None:
            self._run.summary["status"] = status
            self._run.finish(exit_code=int(status == "failed"))
