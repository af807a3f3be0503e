"""What the entry point names."""

from agentrl_core.api import PluginSpec
from agentrl_tracker_wandb.config import WandbConfig

TRACKER = PluginSpec(
    kind="tracker",
    name="wandb",
    api_version=1,
    summary="metrics, configuration and trajectory tables in Weights & Biases, offline unless asked",
    config=WandbConfig,
    factory="agentrl_tracker_wandb.tracker:WandbTracker",
    requires=("wandb>=0.28",),
)
