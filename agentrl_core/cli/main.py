"""The command line. A command's module is imported only when the command is typed: `agentrl --help` needs no torch."""

import json
import os
import sys
from functools import partial
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, Any

import typer

import agentrl_core
from agentrl_core.cli.groups import LazyCommand, OpenGroup

COMMANDS = {
    "train": ("train:train", "Train an agent from a YAML config."),
    "eval": ("evaluate:run", "Validate a model or a checkpoint; keep its metrics and trajectories."),
    "export": ("export:run", "Copy a checkpoint's model into a directory that transformers can load."),
    "doctor": ("doctor:run", "Compare installed packages with the tested versions."),
    "config": ("config:app", "Inspect configurations."),
    "plugins": ("plugins:app", "List and inspect plugins."),
    "rollouts": ("rollouts:app", "Inspect the trajectories of a run."),
    "completion": ("completion:run", "Print the completion script of a shell."),
}
"""By name: the module and its function or group of commands, and the help text."""
VERBOSE = "agentrl.verbose"
AS_JSON = "agentrl.json"
COMPLETE = "_AGENTRL_COMPLETE"
"""The variable in which a shell asks for completions."""


def load_own(name: str) -> Any:
    target, help_text = COMMANDS[name]
    module, _, attribute = target.partition(":")
    found = getattr(import_module(f"agentrl_core.cli.{module}"), attribute)
    app = found if isinstance(found, typer.Typer) else typer.Typer(add_completion=False)
    if app is not found:
        app.command()(found)
    command = typer.main.get_command(app)
    command.help = help_text
    return command


class AgentRLGroup(OpenGroup):
    """The root: our commands and those of packages; turns agentrl's errors into messages."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, (_, help_text) in COMMANDS.items():
            self.add_command(LazyCommand(name, help_text, partial(load_own, name)))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take ``--debug`` wherever it stands: an error is seen after the command was typed."""
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[VERBOSE] = "--debug" in args[:end]
        ctx.meta[AS_JSON] = "--json" in args[:end]
        return super().parse_args(ctx, [each for each in args[:end] if each != "--debug"] + args[end:])

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            from agentrl_core.cli import _shared

            if ctx.meta[AS_JSON] and not isinstance(error, typer.Exit | typer.Abort):
                # Scripts read one document from standard output, whatever happens.
                typer.echo(json.dumps({"error": _shared.message(error)}, ensure_ascii=False))
            if not _shared.is_for_the_user(error):
                raise
            _shared.print_error(error, verbose=ctx.meta.get(VERBOSE, False))
            raise typer.Exit(_shared.exit_code(error)) from error


app = typer.Typer(
    name="agentrl",
    cls=AgentRLGroup,
    help="Train tool-using language-model agents with reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"agentrl {agentrl_core.__version__}")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", "--verbose", help="Show the traceback of an error; allowed after a command too.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    ctx.meta[VERBOSE] = debug or ctx.meta[VERBOSE]


def main() -> None:
    """Entry point of the ``agentrl`` script."""
    # A path that is not UTF-8 is shown with escapes.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if COMPLETE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]  # typer re-exports it silently

        completion_init()
    app(prog_name="agentrl")


if __name__ == "__main__":
    main()
