"""``agentrl eval``."""

import json
import logging
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from agentrl_core.api.errors import ConfigError
from agentrl_core.cli._shared import (
    ConfigFile,
    Overrides,
    console_of_stdout,
    log_transformers,
    new_table,
    reading_input,
    say,
    set_up_logging,
)
from agentrl_core.config import ResolvedConfig, load_config, to_yaml
from agentrl_core.config.schema import UNTRAINED
from agentrl_core.runs.atomic import replace_file
from agentrl_core.runs.run_dir import RunDir, next_numbered

logger = logging.getLogger(__name__)


def run(
    config: ConfigFile,
    overrides: Overrides = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Directory of a checkpoint. By default: the configuration's model.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="New directory for metrics and trajectories.", show_default="OUTPUT_DIR/NAME.eval/<n>"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the metrics as JSON.")] = False,
) -> None:
    """Validate the configuration's model, or that of a checkpoint; keep metrics and trajectories."""
    import rich
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from agentrl_core.fsdp2.adapters import CONFIG_FILE
    from agentrl_core.fsdp2.model_files import save_merged
    from agentrl_core.rollout.manager import AgentLoopManager
    from agentrl_core.runs.records import RolloutWriter
    from agentrl_core.trainer.checkpoint import actor_folders, checkpoint_path, read_state
    from agentrl_core.trainer.outcomes import make_records
    from agentrl_core.trainer.preparation import Preparation
    from agentrl_core.trainer.roles import start_engines, start_images, start_named_engines, start_runtime
    from agentrl_core.trainer.run import copy_tokenizer
    from agentrl_core.trainer.validation import validate

    set_up_logging(stderr=as_json)
    logger.info("starting the model of %s", checkpoint or config)
    log_transformers()
    step, changes, folders = 0, overrides or [], dict[str, Path]()
    if checkpoint is not None:
        found = checkpoint_path(checkpoint)
        step = read_state(found).step
        folders = actor_folders(found)
        if actor := folders.get(""):
            key = "model.adapter.path" if (actor / CONFIG_FILE).exists() else "model.path"
            changes = [*changes, f"{key}={json.dumps(str(actor))}"]
    read = load_config(config, changes)
    wanted = {name for name, policy in read.policies.items() if not policy.frozen}
    if (folders and "" not in folders) and (not wanted or wanted - folders.keys()):
        raise ConfigError(
            f"policies: found {', '.join(sorted(wanted)) or 'none'}, but {checkpoint} has the policies "
            f"{', '.join(folders)}; use the configuration of its run"
        )
    changes = [*changes, *_frozen(read, folders)]
    loaded = asked = load_config(config, changes)
    adapter = loaded.model.adapter
    evaluated = (adapter and adapter.path) or loaded.model.path
    merged = None
    if adapter is not None and not loaded.serves_adapters and adapter.path is not None:
        merged = TemporaryDirectory(prefix="agentrl-merged-")
        save_merged(adapter.path, merged.name, loaded.model.path)
        copy_tokenizer(Path(loaded.model.path), Path(merged.name))
        changes = [*changes, f"model.path={json.dumps(merged.name)}"]
    if adapter is not None and (merged is not None or adapter.path is None):
        # A new adapter adds nothing yet.
        loaded = load_config(config, [*changes, "model.adapter=null"])
    with reading_input():
        preparation = Preparation.of(loaded, training=False)
    rows = preparation.data.validation
    if not rows:
        raise ConfigError("data.validation_files: expected at least one file to evaluate on, found none")
    directory = _new_directory(loaded, output)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=rich.get_console(), transient=True) as progress, start_runtime(loaded) as runtime:
        task = progress.add_task("starting the engine", total=None)
        engines = start_engines(loaded, runtime, preparation)
        images = start_images(loaded, runtime, preparation, directory.path)
        manager = AgentLoopManager(loaded, runtime, engines, start_named_engines(loaded, runtime), images)
        logger.info("answering %d prompts", len(rows[: loaded.trainer.validation.max_prompts]))
        manager.on_progress = lambda done, total: progress.update(
            task, description=f"{done} of {total} trajectories have ended"
        )
        metrics, results = validate(loaded, rows, step, manager)
    replace_file(directory.config_file, to_yaml(asked))
    replace_file(directory.metrics_file, json.dumps({"step": step, **metrics}) + "\n")
    RolloutWriter(directory.rollouts_dir).write(step, "validation", make_records(step, "validation", results))
    if as_json:
        found_in = {"model": evaluated, "step": step, "directory": str(directory.path), "metrics": metrics}
        typer.echo(json.dumps({"schema_version": 1, **found_in}, indent=2))
        return
    say(f"\n{len(results)} trajectories, {checkpoint or evaluated}")
    table = new_table("METRIC", "VALUE", right=["VALUE"])
    for name, value in sorted(metrics.items()):
        table.add_row(name, f"{value:.3f}")
    console_of_stdout().print(table)
    say(f"\nNext:\n  agentrl rollouts show {shlex.quote(str(directory.path))} --validation")


def _frozen(config: ResolvedConfig, folders: Mapping[str, Path]) -> Iterator[str]:
    """Overrides with which no policy is trained, and each has its adapter of ``folders``, or what it begins with."""
    for name, policy in config.policies.items():
        source = policy if policy.copy_of is None else config.policies[policy.copy_of]
        adapter = source.adapter or (config.model.adapter if source.is_trained else None)
        path = folders.get(name) or (adapter and adapter.path)
        # A new adapter adds nothing yet.
        values = {**UNTRAINED, "adapter": "null" if path is None else json.dumps({"path": str(path)})}
        yield from (f"policies.{name}.{key}={value}" for key, value in values.items())


def _new_directory(config: ResolvedConfig, output: Path | None) -> RunDir:
    if output is None:
        output = next_numbered(Path(config.trainer.output_dir) / f"{config.trainer.name}.eval")
    directory = RunDir.create(output.parent, output.name)
    if any(output.iterdir()):
        raise ConfigError(f"--output: {output} is not empty. Choose a new directory, so that nothing is overwritten")
    return directory
