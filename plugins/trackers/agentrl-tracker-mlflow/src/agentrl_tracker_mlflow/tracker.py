"""A run of MLflow."""

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag

from agentrl_core.api import EndedTrajectory, Tracker, TrackerContext, trajectory_table
from agentrl_tracker_mlflow.config import MlflowConfig

_ID = "agentrl.run_id"
_AT_ONCE = {"metrics": 1000, "params": 100}
"""MLflow's limits of a request."""
_LONGEST_PARAM = 6000
_STATUS = {"completed": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowTracker(Tracker):
    """Logs to an MLflow run that starts with the first step, so that a dry run leaves none behind.

    A resumed run continues the same MLflow run, which has its id as the tag ``agentrl.run_id``.
    """

    config: MlflowConfig

    def __init__(self, config: MlflowConfig, context: TrackerContext) -> None:
        super().__init__(config, context)
        self._runs = context.run_dir.parent
        self._client: Any = None
        self._run = ""

    def _started(self) -> Any:
        if self._client is None:
            local = f"sqlite:///{self._runs / 'mlflow.db'}"
            uri = self.config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or local
            client = MlflowClient(tracking_uri=uri)
            found = client.get_experiment_by_name(self.config.experiment)
            artifacts = (self._runs / "mlartifacts").as_uri() if uri == local else None
            experiment = (
                found.experiment_id
                if found
                else client.create_experiment(self.config.experiment, artifact_location=artifacts)
            )
            self._run = self._continued(client, experiment) or self._created(client, experiment)
            self._client = client
        return self._client

    def _continued(self, client: Any, experiment: str) -> str:
        runs = client.search_runs([experiment], f"tags.`{_ID}` = '{self.context.run_id}'", max_results=1)
        for run in runs:
            client.update_run(run.info.run_id, status="RUNNING")
        return runs[0].info.run_id if runs else ""

    def _created(self, client: Any, experiment: str) -> str:
        tags = {_ID: self.context.run_id, "agentrl.run_dir": str(self.context.run_dir)}
        run: str = client.create_run(experiment, run_name=self.context.run_name, tags=tags).info.run_id
        params = [Param(_name(key), str(value)[:_LONGEST_PARAM]) for key, value in _flat("", self.context.config)]
        for start in range(0, len(params), _AT_ONCE["params"]):
            client.log_batch(run, params=params[start : start + _AT_ONCE["params"]])
        client.log_dict(run, dict(self.context.config), "config.yaml")
        return run

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        client, now = self._started(), int(time.time() * 1000)
        entries = [Metric(_name(name), value, now, step) for name, value in metrics.items()]
        for start in range(0, len(entries), _AT_ONCE["metrics"]):
            client.log_batch(self._run, metrics=entries[start : start + _AT_ONCE["metrics"]])

    def log_trajectories(self, trajectories: Sequence[EndedTrajectory], step: int) -> None:
        for split, (columns, rows) in trajectory_table(trajectories, step, self.config.trajectories).items():
            # One file a step: MLflow appends to a table by sending all of it again.
            file = f"trajectories/{split}-{step:06d}.json"
            client = self._started()
            client.log_table(self._run, pandas.DataFrame(rows, columns=columns), file)

    def finish(self, status: str) -> None:
        if self._client is not None:
            self._client.log_batch(self._run, tags=[RunTag("agentrl.status", status)])
            self._client.set_terminated(self._run, _STATUS[status])


def _name(name: str) -> str:
    """The name with the characters that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Dotted keys and scalars; lists of scalars stay together."""
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), child)
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        yield from _flat(prefix, dict(enumerate(value)))
    else:
        yield prefix, value
