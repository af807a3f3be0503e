"""A run of SwanLab."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import swanlab

from agentrl_core.api import EndedTrajectory, Tracker, TrackerContext, trajectory_table
from agentrl_tracker_swanlab.config import SwanlabConfig

_STATE: dict[str, Literal["success", "aborted", "crashed"]] = {
    "completed": "success",
    "stopped": "aborted",
    "failed": "crashed",
}


class SwanlabTracker(Tracker):
    """Logs to a SwanLab run that starts with the first step, so that a dry run leaves none behind.

    A resumed run continues the same SwanLab run, by its id.
    """

    config: SwanlabConfig

    def __init__(self, config: SwanlabConfig, context: TrackerContext) -> None:
        super().__init__(config, context)
        self._run: Any = None

    def _started(self) -> Any:
        if self._run is None:
            folder = self.context.run_dir / "swanlog"
            folder.mkdir(exist_ok=True)
            self._run = swanlab.init(
                project=self.config.project,
                workspace=self.config.workspace,
                name=self.context.run_name,
                id=self.context.run_id[:21],
                resume="allow",
                mode=self.config.mode,
                log_dir=str(folder),
                config=dict(self.context.config),
            )
        return self._run

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._started().log(dict(metrics), step=step)

    def log_trajectories(self, trajectories: Sequence[EndedTrajectory], step: int) -> None:
        for split, (columns, rows) in trajectory_table(trajectories, step, self.config.trajectories).items():
            # SwanLab has no tables of text.
            texts = ["\n".join(f"{name}: {cell}" for name, cell in zip(columns, row, strict=True)) for row in rows]
            media = [swanlab.Text(text, caption=str(row[1])) for text, row in zip(texts, rows, strict=True)]
            self._started().log({f"trajectories/{split}": media}, step=step)

    def finish(self, status: str) -> None:
        if self._run is not None:
            error = "the agentrl run failed; log.txt says why" if status == "failed" else None
            self._run.finish(state=_STATE[status], error=error)
