"""Metrics as JSON lines: ``{"step": 3, "time": "2025-01-31T12:00:00.000+01:00", "reward/mean": 0.41, …}``."""

from collections.abc import Mapping

from agentrl_core.api.config import NoConfig
from agentrl_core.api.tracker import Tracker, TrackerContext
from agentrl_core.runs.run_dir import RunDir, timestamp


class JsonlTracker(Tracker):
    """Appends one line per step to ``metrics.jsonl``; each is on disk before the next step starts."""

    def __init__(self, config: NoConfig, context: TrackerContext) -> None:
        super().__init__(config, context)
        self._run_dir = RunDir(context.run_dir)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = {name: float(value) for name, value in metrics.items()}
        self._run_dir.append_metrics({"step": step, "time": timestamp(), **values})
