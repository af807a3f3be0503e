"""What the entry point names."""

from agentrl_core.api import PluginSpec
from agentrl_tracker_mlflow.config import MlflowConfig

TRACKER = PluginSpec(
    kind="tracker",
    name="mlflow",
    api_version=1,
    summary="metrics, configuration and trajectory tables in MLflow, in a local SQLite file unless asked",
    config=MlflowConfig,
    factory="agentrl_tracker_mlflow.tracker:MlflowTracker",
    requires=("mlflow-skinny>=3.5", "sqlalchemy>=2", "alembic>=1.14"),
)
