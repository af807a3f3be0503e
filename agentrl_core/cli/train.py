"""``agentrl train``."""

import json
import logging
import shlex
from pathlib import Path
from typing import Annotated

import typer

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
from agentrl_core.cli.main import VERBOSE
from agentrl_core.config import ResolvedConfig, load_config
from agentrl_core.config.slots import all_slots
from agentrl_core.rollout.pacing import fewer_collections
from agentrl_core.runs.run_dir import RunDir

logger = logging.getLogger(__name__)


def train(
    ctx: typer.Context,
    config: ConfigFile,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print plugins and batch arithmetic, start nothing.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint, if there is one.")
    ] = False,
    allow_plugin_drift: Annotated[
        bool, typer.Option("--allow-plugin-drift", help="Resume although plugin versions have changed.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log more; show the traceback of an error.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON.")] = False,
) -> None:
    """The command: :func:`run` with what the options say."""
    ctx.meta[VERBOSE] = verbose or ctx.meta[VERBOSE]
    overrides = [*(overrides or []), *(["plugins.allow_drift=true"] if allow_plugin_drift else [])]
    if as_json and not dry_run:
        raise typer.BadParameter("goes with --dry-run; a run writes metrics.jsonl", param_hint="--json")
    if as_json:
        set_up_logging(ctx.meta[VERBOSE], stderr=True)
        _dry_run(load_config(config, overrides), as_json)
        return
    run(config=config, overrides=overrides, dry_run=dry_run, resume=resume, verbose=ctx.meta[VERBOSE])


def run(config: Path, overrides: list[str], dry_run: bool, resume: bool, verbose: bool) -> None:
    """Train, or with ``dry_run`` check everything that can be known before a worker starts."""
    set_up_logging(verbose)
    logger.info("reading %s", config)
    loaded = load_config(config, [*overrides, *(["trainer.resume=auto"] if resume else [])])
    if dry_run:
        _dry_run(loaded)
        return
    # Torch and transformers take seconds to import; errors in the configuration are reported before that.
    logger.info("loading torch and transformers")
    with fewer_collections():
        from agentrl_core.trainer import Trainer
        from agentrl_core.trainer.plan import memory_line

        if line := memory_line(loaded):
            logger.info("%s", line)
        log_transformers()
        with reading_input():
            trainer = Trainer(loaded)
    arguments = shlex.join([str(config), *overrides])
    try:
        path = trainer.fit()
    except BaseException as error:
        if trainer.run.began and (trainer.run.path / "checkpoints" / "latest").exists():
            error.add_note(f"To continue the run after the last checkpoint: agentrl train {arguments} --resume")
        raise
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    held = [name for name in ("metrics.jsonl", "rollouts", "checkpoints", "curve.png") if (path / name).exists()]
    state = RunDir(path).read_state()
    if state is not None and state.warnings:
        say("\nWarnings of this run (docs/troubleshooting.md explains them):")
        for warning in state.warnings:
            say(f"  {warning['message']}")
    say(f"\n{shown} holds {', '.join(held)}. Next:")
    is_finished = state is not None and state.finished
    if not is_finished:
        say(f"  agentrl train {arguments} --resume")
    if "rollouts" in held:
        say(f"  agentrl rollouts show {shown} -n 3")
    checkpoint = shown / "checkpoints" / ("best" if (path / "checkpoints" / "best").exists() else "latest")
    if trainer.preparation.data.validation:
        say(f"  agentrl eval {arguments} --checkpoint {checkpoint}")
    policy = f" --policy {next(iter(loaded.trained))}" if loaded.policies else ""
    say(f"  agentrl export {checkpoint} out/{policy}")
    if trainer.stop.number is not None and not is_finished:
        # As shells report a process that a signal ended: commands after `agentrl train … &&` must not run.
        raise typer.Exit(128 + trainer.stop.number)


def _dry_run(config: ResolvedConfig, as_json: bool = False) -> None:
    logger.info("loading torch and transformers")
    with fewer_collections():
        from agentrl_core.trainer.preparation import Preparation

        logger.info("checking model, tokenizer and prompts")
        with reading_input():
            preparation = Preparation.of(config, listeners=True)
    plugins = [(slot.kind, slot.registered_name, slot.ref.dist, slot.ref.version) for slot in all_slots(config)]
    if as_json:
        keys = "kind", "name", "package", "version"
        content = {"plugins": [dict(zip(keys, each, strict=True)) for each in plugins], **preparation.to_dict(config)}
        typer.echo(json.dumps({"schema_version": 1, **content}, indent=2, ensure_ascii=False))
        return
    table = new_table("KIND", "NAME", "PACKAGE", "VERSION", title="Plugins")
    for *names, version in plugins:
        table.add_row(*names, version[:12])
    console_of_stdout().print(table)
    for line in ("", *preparation.lines(config)):
        say(line)
    say("\nThe configuration is valid. Nothing was started.")
