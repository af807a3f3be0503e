"""``agentrl train``."""

import logging
import shlex
from pathlib import Path

import rich
import typer

from agentrl_core.cli import _logging
from agentrl_core.config import ResolvedConfig, load_config
from agentrl_core.config.slots import all_slots
from agentrl_core.runs.run_dir import RunDir

logger = logging.getLogger(__name__)


def run(config: Path, overrides: list[str], dry_run: bool, resume: bool, verbose: bool) -> None:
    """Train, or with ``dry_run`` check everything that can be known before a worker starts."""
    _logging.setup(verbose)
    logger.info("reading %s", config)
    loaded = load_config(config, [*overrides, *(["trainer.resume=auto"] if resume else [])])
    if dry_run:
        _dry_run(loaded)
        return
    # Torch and transformers take seconds to import; errors in the configuration are reported before that.
    logger.info("loading torch and transformers")
    from agentrl_core.trainer import Trainer

    trainer = Trainer(loaded)
    path = trainer.fit()
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    held = [name for name in ("metrics.jsonl", "rollouts", "checkpoints", "curve.png") if (path / name).exists()]
    arguments = shlex.join([str(config), *overrides])
    _say(f"\n{shown} holds {', '.join(held)}. Next:")
    state = RunDir(path).read_state()
    if state is not None and not state.finished:
        _say(f"  agentrl train {arguments} --resume")
    if "rollouts" in held:
        _say(f"  agentrl rollouts show {shown} -n 3")
    if loaded.data.validation_files:
        _say(f"  agentrl eval {arguments} --checkpoint {shown}/checkpoints/latest")
    _say(f"  agentrl export {shown}/checkpoints/latest out/")
    if trainer.stop.number is not None:
        # As shells report a process that a signal ended: what follows `agentrl train … &&` must not run.
        raise typer.Exit(128 + trainer.stop.number)


def _say(line: str) -> None:
    """A line that can be copied as it is: not wrapped, and without a meaning of its brackets."""
    rich.get_console().print(line, markup=False, highlight=False, soft_wrap=True)


def _dry_run(config: ResolvedConfig) -> None:
    from rich.table import Table

    from agentrl_core.trainer.preparation import Preparation

    preparation = Preparation.of(config, listeners=True)
    table = Table(title="Plugins", title_justify="left", box=None)
    for column in ("KIND", "NAME", "PACKAGE", "VERSION"):
        table.add_column(column)
    for slot in all_slots(config):
        table.add_row(slot.kind, slot.registered_name, slot.ref.dist, slot.ref.version[:12])
    rich.print(table)
    rich.print()
    for line in preparation.lines(config):
        _say(line)
    _say("\nEverything fits. Nothing was started.")
