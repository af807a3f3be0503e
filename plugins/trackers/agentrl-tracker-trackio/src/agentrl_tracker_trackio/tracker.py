"""A run of Trackio."""

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

import pandas
import trackio

from agentrl_core.api import EndedTrajectory, Tracker, TrackerContext, trajectory_table
from agentrl_tracker_trackio.config import TrackioConfig


class TrackioTracker(Tracker):
    """Logs to a Trackio run that starts with the first step, so that a dry run leaves none behind.

    Its name is that of the run and the first digits of the run's id: Trackio resumes by name.
    """

    config: TrackioConfig

    def __init__(self, config: TrackioConfig, context: TrackerContext) -> None:
        super().__init__(config, context)
        self._run: Any = None

    def _started(self) -> Any:
        if self._run is None:
            # It prints how to open its dashboard, over a live console.
            with contextlib.redirect_stdout(io.StringIO()):
                self._run = trackio.init(
                    project=self.config.project,
                    name=f"{self.context.run_name}-{self.context.run_id[:8]}",
                    space_id=self.config.space_id,
                    server_url=self.config.server_url,
                    config=dict(self.context.config),
                    resume="allow",
                    embed=False,
                    auto_log_gpu=False,
                    auto_log_cpu=False,
                )
        return self._run

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._started().log(dict(metrics), step=step)

    def log_trajectories(self, trajectories: Sequence[EndedTrajectory], step: int) -> None:
        for split, (columns, rows) in trajectory_table(trajectories, step, self.config.trajectories).items():
            table = trackio.Table(dataframe=pandas.DataFrame(rows, columns=columns))
            self._started().log({f"trajectories/{split}": table}, step=step)

    def finish(self, status: str) -> None:
        if self._run is not None:
            level = trackio.AlertLevel.ERROR if status == "failed" else trackio.AlertLevel.INFO
            with contextlib.redirect_stdout(io.StringIO()):
                self._run.alert(f"{self.context.run_name} {status}", level=level)
                self._run.finish()
