"""``agentrl eval``."""

import json
import shlex
from pathlib import Path

import rich
import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from agentrl_core.api import ConfigError
from agentrl_core.cli import _logging
from agentrl_core.config import ResolvedConfig, load_config, to_yaml
from agentrl_core.rollout.manager import AgentLoopManager
from agentrl_core.runs.atomic import replace_file
from agentrl_core.runs.records import RolloutWriter
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.serving.replicas import EngineReplicas
from agentrl_core.trainer.checkpoint import checkpoint_path, read_state
from agentrl_core.trainer.preparation import Preparation
from agentrl_core.trainer.records import make_records
from agentrl_core.trainer.roles import assign_engines, engine_context, start_runtime
from agentrl_core.trainer.validation import Validator


def run(config: Path, overrides: list[str], checkpoint: Path | None, output: Path | None, as_json: bool) -> None:
    """Validate the model of the configuration, or that of a checkpoint; keep metrics and trajectories."""
    _logging.setup(stderr=as_json)
    step = 0
    if checkpoint is not None:
        found = checkpoint_path(checkpoint)
        step = read_state(found).step
        overrides = [*overrides, f"model.path={json.dumps(str(found / 'actor'))}"]
    loaded = load_config(config, overrides)
    if not loaded.data.validation_files:
        raise ConfigError("data.validation_files: expected at least one file to evaluate on, found none")
    preparation = Preparation.of(loaded, training=False)
    directory = _new_directory(loaded, output)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=rich.get_console(), transient=True) as progress, start_runtime(loaded) as runtime:
        task = progress.add_task("starting the engine", total=None)
        engine = engine_context(loaded, preparation.plan, preparation.facts)
        engines = EngineReplicas(runtime, loaded, engine, assign_engines(loaded, None))
        manager = AgentLoopManager(loaded, runtime, engines)
        try:
            engines.start()
            progress.update(task, description=f"answering {len(preparation.data.validation)} prompts")
            metrics, results = Validator(loaded, preparation.data.validation).run(step, manager)
        finally:
            manager.close()
            engines.close()
    replace_file(directory.config_file, to_yaml(loaded))
    replace_file(directory.metrics_file, json.dumps({"step": step, **metrics}) + "\n")
    RolloutWriter(directory.rollouts_dir).write(step, "validation", make_records(step, "validation", results, {}))
    if as_json:
        found_in = {"model": loaded.model.path, "step": step, "directory": str(directory.path), "metrics": metrics}
        typer.echo(json.dumps({"schema_version": 1, **found_in}, indent=2))
        return
    table = Table(
        title=f"{len(results)} trajectories, {checkpoint or loaded.model.path}", title_justify="left", box=None
    )
    table.add_column("METRIC")
    table.add_column("VALUE", justify="right")
    for name, value in sorted(metrics.items()):
        table.add_row(name, f"{value:.3f}")
    rich.print(table)
    command = f"  agentrl rollouts show {shlex.quote(str(directory.path))} --validation"
    rich.get_console().print(f"\nNext:\n{command}", markup=False, highlight=False, soft_wrap=True)


def _new_directory(config: ResolvedConfig, output: Path | None) -> RunDir:
    parent = Path(config.trainer.output_dir) / f"{config.trainer.name}.eval"
    if output is None:
        taken = [int(entry.name) for entry in parent.glob("*") if entry.name.isdecimal()]
        output = parent / str(max(taken, default=0) + 1)
    directory = RunDir.create(output.parent, output.name)
    if any(output.iterdir()):
        raise ConfigError(f"--output: {output} is not empty; name a new directory, so that nothing is overwritten")
    return directory
