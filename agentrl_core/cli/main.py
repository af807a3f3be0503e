"""The command line. A command's module is imported only when the command is typed: `agentrl --help` needs no torch.

Packages add subcommands through the entry-point group ``agentrl.cli``: ``name = "package.module:typer_app"``.
"""

import ast
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, TypeGuard

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
    "rollouts": ("rollouts:app", "Inspect the trajectories of a run."),
    "bench": ("bench:run", "Measure where the time of a training step goes, and compare two configs or commits."),
    "replay": ("rollouts:replay_run", "Run recorded trajectories again with another part, and show what differs."),
    "reward": ("rollouts:reward_app", "Debug reward functions."),
    "runs": ("runs:app", "List and compare runs."),
    "completion": ("completion:run", "Print the completion script of a shell."),
}
"""By name: the module and its function or group of commands, and the help text."""
VERBOSE = "agentrl.verbose"
AS_JSON = "agentrl.json"
COMPLETE = "_AGENTRL_COMPLETE"
"""The variable in which a shell asks for completions."""


class LazyCommand(TyperCommand):
    """Stands for a command in the help, and loads it when it is typed."""

    def __init__(self, name: str, help_text: str, load: Callable[[], Any]) -> None:
        super().__init__(name=name, callback=None, help=help_text)
        self._load = load

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self._load().make_context(info_name, args, parent=parent, **extra)


def _described(target: str) -> str:
    """The help of a module's Typer app, else of its only command, read from the source and not imported; else empty."""
    top, *below = target.partition(":")[0].split(".")
    spec = find_spec(top)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    path = Path(folders[0], *below).with_suffix(".py") if folders and below else Path(spec.origin or "" if spec else "")
    try:
        module = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""
    calls = [
        node for node in ast.walk(module) if isinstance(node, ast.Call) and ast.unparse(node.func) == "typer.Typer"
    ]
    texts = [
        word.value.value for call in calls for word in call.keywords if word.arg == "help" and _is_text(word.value)
    ]
    commands = [
        ast.get_docstring(node) or ""
        for node in module.body
        if isinstance(node, ast.FunctionDef) and any(".command(" in ast.unparse(each) for each in node.decorator_list)
    ]
    found = texts or (commands if len(commands) == 1 else [""])
    return str(found[0]).partition("\n")[0]


def _is_text(node: ast.expr) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


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


def load_registered(name: str, registered: list[Any]) -> Any:
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


def plugin_commands() -> dict[str, list[Any]]:
    from agentrl_core.api.plugin import CLI_GROUP
    from agentrl_core.plugins.registration import registered_in

    commands: dict[str, list[Any]] = {}
    for registration in registered_in(CLI_GROUP):
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
        ctx.meta[AS_JSON] = "--json" in args[:end]
        return super().parse_args(ctx, [each for each in args[:end] if each != "--debug"] + args[end:])

    def list_commands(self, ctx: Any) -> list[str]:
        return [*self.commands, *sorted(plugin_commands().keys() - self.commands.keys())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        registered = plugin_commands().get(cmd_name)
        if not registered:
            _raise_if_official(cmd_name)
            return None
        packages = " and ".join(each.package for each in registered)
        described = _described(registered[0].entry_point.value).rstrip(".")
        help_text = f"{described} (from {packages})." if described else f"From package {packages}."
        return LazyCommand(cmd_name, help_text, partial(load_registered, cmd_name, registered))

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
