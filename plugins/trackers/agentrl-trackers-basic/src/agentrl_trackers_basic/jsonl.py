"""Metrics as JSON lines: ``{"step": 3, "time": "2025-01-31T12:00:00.000+01:00", "reward/mean": 0.41, …}``."""

import json
import math
import os
from collections.abc import Mapping
from datetime import datetime

from agentrl_core.api import Tracker
from agentrl_trackers_basic.metrics import metrics_file


class JsonlTracker(Tracker):
    """Appends one line per step to ``metrics.jsonl``; each is on disk before the next step starts.

    JSON has no NaN and no infinity: they become null.
    """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = {name: number if math.isfinite(number := float(value)) else None for name, value in metrics.items()}
        record = {"step": step, "time": datetime.now().astimezone().isoformat(timespec="milliseconds"), **values}
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        with metrics_file(self.context.run_dir).open("ab+") as file:
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                # A killed process can leave a line without its end: it must not swallow this one.
                line = line if file.read(1) == b"\n" else b"\n" + line
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
