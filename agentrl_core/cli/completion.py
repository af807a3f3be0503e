"""``agentrl completion``."""

from enum import StrEnum
from typing import Annotated

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]  # typer re-exports it silently

from agentrl_core.cli.main import COMPLETE


class Shell(StrEnum):
    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def run(shell: Annotated[Shell, typer.Argument(help="Shell.", show_default=False)]) -> None:
    """Print a shell's completion script: eval "$(agentrl completion bash)", or agentrl completion fish | source."""
    typer.echo(get_completion_script(prog_name="agentrl", complete_var=COMPLETE, shell=shell))
