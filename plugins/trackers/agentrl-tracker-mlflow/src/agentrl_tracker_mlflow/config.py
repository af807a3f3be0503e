"""Options of the tracker."""

from dataclasses import dataclass

from agentrl_core.api import option


@dataclass
class MlflowConfig:
    tracking_uri: str | None = option(
        None, help="MLflow tracking URI; null: MLFLOW_TRACKING_URI, or mlflow.db in trainer.output_dir"
    )
    experiment: str = option("agentrl", help="MLflow experiment")
    trajectories: int = option(8, ge=0, help="trajectories of each rollout that go into its table; 0: no tables")
