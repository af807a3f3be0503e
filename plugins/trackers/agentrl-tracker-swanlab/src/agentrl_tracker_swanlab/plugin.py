"""What the entry point names."""

from agentrl_core.api import PluginSpec
from agentrl_tracker_swanlab.config import SwanlabConfig

TRACKER = PluginSpec(
    kind="tracker",
    name="swanlab",
    api_version=1,
    summary="metrics, configuration and trajectories in SwanLab, offline unless asked",
    config=SwanlabConfig,
    factory="agentrl_tracker_swanlab.tracker:SwanlabTracker",
    requires=("swanlab>=0.10",),
)
