"""The command line. A command's module is imported only when the command is typed: `agentrl --help` needs no torch.

Packages add subcommands through the entry-point group ``agentrl.cli``: ``name = "package.module:typer_app"``.
"""

import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import agentrl_core

COMMANDS = {
    "init": ("init:run", "Write a config for your model, data, tool and reward."),
    "train": ("train:train", "Train an agent from a YAML config."),
    "eval": ("evaluate:run", "Validate a model or a checkpoint; keep its metrics and trajectories."),
    "export": ("export:run", "Copy a checkpoint's model into a directory that transformers can load."),
    "doctor": ("doctor:run", "Compare installed packages with the tested versions."),
    "config": ("config:app", "Inspect configurations."),
    "plugins": ("plugins:app", "List, inspect, check and create plugins."),
    "engines": ("engines:app", "Set up engine environments and measure engines."),
    "rollouts": ("rollouts:app", "Inspect the trajectories of a run."),
    "bench": ("bench:run", "Measure where the time of a training step goes, and compare two configs or commits."),
    "replay": ("rollouts:replay_run", "Run recorded trajectories again with another part, and show what differs."),
    "reward": ("rollouts:reward_app", "Debug reward functions."),
    "runs": ("runs:app", "List and compare runs."),
    "completion": ("completion:run", "Print the completion script of a shell."),
}
"""By name: the module and its function or group of commands, and the help text."""
VERBOSE = "agentrl.verbose"
COMPLETE = "_AGENTRL_COMPLETE"
"""The variable in which a shell asks for completions."""


class LazyCommand(TyperCommand):
    """Stands for a command in the help, and loads it when it is typed."""

    def __init__(self, name: str, help_text: str, load: Callable[[], Any]) -> None:
        super().__init__(name=name, callback=None, help=help_text)
        self._load = load

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self._load().make_context(info_name, args, parent=parent, **extra)


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


def _load_registered(name: str, registered: list[Any]) -> Any:
    from agentrl_core.api.errors import PluginBrokenError, PluginConflictError
    from agentrl_core.plugins.spec import imported

    if len(registered) > 1:
        packages = " and ".join(each.package for each in registered)
        raise PluginConflictError(
            f"subcommand {name!r} is registered by {packages}. Uninstall one, or name its package in "
            "AGENTRL_PLUGINS_BLOCK"
        )
    (registration,) = registered
    value = registration.entry_point.value
    found = imported(
        registration.package, f"importing {value} for the subcommand {name!r}", registration.entry_point.load
    )
    if not isinstance(found, typer.Typer):
        raise PluginBrokenError(
            f"package {registration.package} is broken: {value} for the subcommand {name!r} is a "
            f"{type(found).__name__}, must be a typer.Typer"
        )
    return typer.main.get_command(found)


def _plugin_commands() -> dict[str, list[Any]]:
    from agentrl_core.plugins.registration import cli_registrations

    commands: dict[str, list[Any]] = {}
    for registration in cli_registrations():
        commands.setdefault(registration.name, []).append(registration)
    return commands


def _raise_if_official(name: str) -> None:
    from agentrl_core.api.errors import PluginNotFoundError
    from agentrl_core.plugins.official import OFFICIAL

    if package := OFFICIAL.get(("command", name)):
        raise PluginNotFoundError(
            f"agentrl {name} comes with: pip install {package} (all plugins: pip install agentrl-all)"
        )


class AgentRLGroup(TyperGroup):
    """The root: holds our commands, adds those of packages, and turns agentrl's errors into messages."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, (_, help_text) in COMMANDS.items():
            self.add_command(LazyCommand(name, help_text, partial(load_own, name)))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take ``--debug`` wherever it stands: an error is seen after the command was typed."""
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[VERBOSE] = "--debug" in args[:end]
        return super().parse_args(ctx, [each for each in args[:end] if each != "--debug"] + args[end:])

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self.commands, *sorted(_plugin_commands().keys() - self.commands.keys())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        registered = _plugin_commands().get(cmd_name)
        if not registered:
            _raise_if_official(cmd_name)
            return None
        packages = " and ".join(each.package for each in registered)
        return LazyCommand(cmd_name, f"From package {packages}.", partial(_load_registered, cmd_name, registered))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            from agentrl_core.cli import _shared

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
    if COMPLETE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]  # typer re-exports it silently

        completion_init()
    app(prog_name="agentrl")


if __name__ == "__main__":
    main()
