"""The learning curve as a picture, drawn when the run ends."""

from collections.abc import Mapping

from agentrl_core.api import Tracker
from agentrl_trackers_basic.metrics import metrics_file, read_metrics


class CurveTracker(Tracker):
    """Draws ``curve.png`` from ``metrics.jsonl``, which the tracker ``jsonl`` writes; without it there is no curve."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        return None

    def finish(self, status: str) -> None:
        path = metrics_file(self.context.run_dir)
        if len(read_metrics(path)) > 1:
            # Matplotlib takes a second to import, and a run that failed at once should not wait for it.
            from agentrl_trackers_basic.curve import draw_curve

            draw_curve(path, self.context.run_dir / "curve.png", self.context.run_name)
