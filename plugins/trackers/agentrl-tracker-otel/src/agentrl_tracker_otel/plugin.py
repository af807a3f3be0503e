"""What the entry point names."""

from agentrl_core.api import PluginSpec
from agentrl_tracker_otel.config import OtelConfig

TRACKER = PluginSpec(
    kind="tracker",
    name="otel",
    api_version=1,
    summary="OpenTelemetry traces of runs, steps, trajectories, turns and tool calls, to a file and to OTLP",
    config=OtelConfig,
    factory="agentrl_tracker_otel.tracker:OtelTracker",
    requires=("opentelemetry-sdk>=1.35", "opentelemetry-exporter-otlp-proto-http>=1.35"),
)
