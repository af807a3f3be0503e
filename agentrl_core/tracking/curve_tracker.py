"""The learning curve as a picture, drawn when the run ends."""

from collections.abc import Mapping

from agentrl_core.api.config import NoConfig
from agentrl_core.api.tracker import Tracker, TrackerContext
from agentrl_core.runs.run_dir import RunDir


class CurveTracker(Tracker):
    """Draws ``curve.png`` from ``metrics.jsonl``, which the tracker ``jsonl`` writes; without it there is no curve."""

    def __init__(self, config: NoConfig, context: TrackerContext) -> None:
        super().__init__(config, context)
        self._run_dir = RunDir(context.run_dir)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        return None

    def finish(self, status: str) -> None:
        if len(self._run_dir.read_metrics()) > 1:
            # Matplotlib takes a second to import, and a run that failed at once should not wait for it.
            from agentrl_core.tracking.curve import draw_curve

            draw_curve(self._run_dir.metrics_file, self._run_dir.path / "curve.png", self.context.run_name)
