"""What the entry points name."""

from agentrl_core.api import NoConfig, PluginSpec
from agentrl_trackers_basic.config import ConsoleConfig

CONSOLE = PluginSpec(
    kind="tracker",
    name="console",
    api_version=1,
    summary="a live panel in a terminal, one line per step elsewhere",
    config=ConsoleConfig,
    factory="agentrl_trackers_basic.console:ConsoleTracker",
)
JSONL = PluginSpec(
    kind="tracker",
    name="jsonl",
    api_version=1,
    summary="metrics.jsonl in the run's directory, one object a step",
    config=NoConfig,
    factory="agentrl_trackers_basic.jsonl:JsonlTracker",
)
TENSORBOARD = PluginSpec(
    kind="tracker",
    name="tensorboard",
    api_version=1,
    summary="event files for TensorBoard in the run's directory",
    config=NoConfig,
    factory="agentrl_trackers_basic.tensorboard:TensorboardTracker",
    requires=("tensorboard>=2.18", "torch>=2.11"),
)
CURVE = PluginSpec(
    kind="tracker",
    name="curve",
    api_version=1,
    summary="curve.png in the run's directory: reward and validation accuracy over steps",
    config=NoConfig,
    factory="agentrl_trackers_basic.curve_tracker:CurveTracker",
    requires=("matplotlib>=3.9",),
)
