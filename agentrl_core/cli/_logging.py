"""Logging of the command line: through the console that also draws the live view, so that neither tears the other."""

import logging

import rich
from rich.logging import RichHandler


def setup(verbose: bool = False, stderr: bool = False) -> None:
    """Log agentrl's own messages; those of other packages from warnings on.

    With ``stderr`` standard output is left to a command that prints JSON.
    """
    rich.get_console().stderr = stderr
    handler = RichHandler(
        console=rich.get_console(), show_path=False, rich_tracebacks=False, log_time_format="%H:%M:%S"
    )
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler], force=True)
    logging.getLogger("agentrl_core").setLevel(logging.DEBUG if verbose else logging.INFO)
