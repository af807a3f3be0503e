"""What the entry point names."""

from agentrl_core.api import PluginSpec
from agentrl_tracker_trackio.config import TrackioConfig

TRACKER = PluginSpec(
    kind="tracker",
    name="trackio",
    api_version=1,
    summary="metrics, configuration and trajectory tables in Trackio, on this machine unless asked",
    config=TrackioConfig,
    factory="agentrl_tracker_trackio.tracker:TrackioTracker",
    requires=("trackio>=0.20",),
)
