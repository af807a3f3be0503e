"""``agentrl backends``: environments of training backends."""

from pathlib import Path
from typing import Annotated

import typer

from agentrl_engines.cli import DryRun, FindLinks, With, set_up

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Set up environments of training backends.")


@app.callback()
def backends() -> None:
    """Set up environments of training backends."""


@app.command("setup")
def setup_backend(
    name: Annotated[str, typer.Argument(help="Name of the training backend, such as megatron.", show_default=False)],
    path: Annotated[Path | None, typer.Option(help="Folder of the environment.", show_default=".engines/NAME")] = None,
    requirements: With = None,
    find_links: FindLinks = None,
    dry_run: DryRun = False,
) -> None:
    """Create a separate Python environment for training processes, and print its interpreter.

    It gets every installed package with plugins, at the version that is installed here. Run this again after you have
    installed or changed one.
    """
    python = set_up("training_backend", name, path, requirements, find_links, dry_run)
    if python is not None:
        typer.echo(f"trainer.backend.name={name} trainer.backend.python={python}")
