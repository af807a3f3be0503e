"""``agentrl eval``."""

import json
from pathlib import Path

import rich
from rich.table import Table

from agentrl_core.api import ConfigError
from agentrl_core.cli import _logging
from agentrl_core.config import load_config
from agentrl_core.rollout.manager import AgentLoopManager
from agentrl_core.trainer.checkpoint import checkpoint_path, read_state
from agentrl_core.trainer.preparation import Preparation
from agentrl_core.trainer.roles import engine_context, engine_seats, start_runtime
from agentrl_core.trainer.validation import Validator


def run(config: Path, overrides: list[str], checkpoint: Path | None) -> None:
    """Validate the model of the configuration, or that of a checkpoint."""
    _logging.setup()
    step = 0
    if checkpoint is not None:
        found = checkpoint_path(checkpoint)
        step = read_state(found).step
        overrides = [*overrides, f"model.path={json.dumps(str(found / 'actor'))}"]
    loaded = load_config(config, overrides)
    if not loaded.data.validation_files:
        raise ConfigError("data.validation_files: expected at least one file to evaluate on, found none")
    preparation = Preparation.of(loaded, training=False)
    with start_runtime(loaded) as runtime:
        engine = engine_context(loaded, preparation.plan, preparation.facts)
        manager = AgentLoopManager(loaded, runtime, engine, engine_seats(loaded, None))
        try:
            manager.start()
            metrics, results = Validator(loaded, preparation.data.validation, manager).run(step)
        finally:
            manager.close()
    table = Table(
        title=f"{len(results)} trajectories, {checkpoint or loaded.model.path}", title_justify="left", box=None
    )
    table.add_column("METRIC")
    table.add_column("VALUE", justify="right")
    for name, value in sorted(metrics.items()):
        table.add_row(name, f"{value:.3f}")
    rich.print(table)
