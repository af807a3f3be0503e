"""The command line. A subcommand's module is imported only when it is typed, so `agentrl --help` needs no torch.

Packages add subcommands through the entry-point group ``agentrl.cli``: ``name = "package.module:typer_app"``.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import agentrl_core
from agentrl_core.cli import config as config_command
from agentrl_core.cli import engines, plugins

_VERBOSE = "agentrl.verbose"


class PluginCommand(TyperCommand):
    """Stands for a package's subcommand in the help, and becomes it when it is typed."""

    def __init__(self, name: str, registered: list[Any]) -> None:
        packages = " and ".join(each.package for each in registered)
        super().__init__(name=name, callback=None, help=f"From package {packages}.")
        self._registered = registered

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self._load().make_context(info_name, args, parent=parent, **extra)

    def _load(self) -> Any:
        from agentrl_core.api.errors import PluginBrokenError, PluginConflictError
        from agentrl_core.plugins.spec import describe_exception

        if len(self._registered) > 1:
            packages = " and ".join(each.package for each in self._registered)
            raise PluginConflictError(
                f"subcommand {self.name!r} is registered by {packages}: uninstall one, or name its package in "
                "AGENTRL_PLUGINS_BLOCK"
            )
        (registration,) = self._registered
        value = registration.entry_point.value
        try:
            found = registration.entry_point.load()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a foreign module may raise anything
            raise PluginBrokenError(
                f"package {registration.package} is broken: importing {value} for the subcommand {self.name!r} raised "
                f"{describe_exception(error)}"
            ) from error
        if not isinstance(found, typer.Typer):
            raise PluginBrokenError(
                f"package {registration.package} is broken: {value} for the subcommand {self.name!r} is a "
                f"{type(found).__name__}, must be a typer.Typer"
            )
        return typer.main.get_command(found)


class AgentRLGroup(TyperGroup):
    """The root: adds the subcommands of packages, and turns agentrl's errors into messages."""

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        return [*own, *sorted(set(_plugin_commands()) - set(own))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        registered = _plugin_commands().get(cmd_name)
        return PluginCommand(cmd_name, registered) if registered else None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            from agentrl_core.cli import _output

            if not _output.is_missing_extra(error):
                raise
            _fail(ctx, error)
        except Exception as error:
            from agentrl_core.api.errors import AgentRLError
            from agentrl_core.cli import _output

            if not isinstance(error, AgentRLError) and not _output.is_about_the_disk(error):
                raise
            _fail(ctx, error)


app = typer.Typer(
    name="agentrl",
    cls=AgentRLGroup,
    help="Train tool-using language-model agents with reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
rollouts_app = typer.Typer(help="Look at the trajectories of a run.", no_args_is_help=True)
runs_app = typer.Typer(help="Look at the runs of a directory.", no_args_is_help=True)
reward_app = typer.Typer(help="Work on rewards.", no_args_is_help=True)
app.add_typer(config_command.app, name="config")
app.add_typer(plugins.app, name="plugins")
app.add_typer(engines.app, name="engines")
app.add_typer(rollouts_app, name="rollouts")
app.add_typer(reward_app, name="reward")
app.add_typer(runs_app, name="runs")

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Values that replace those of the file.", show_default=False),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"agentrl {agentrl_core.__version__}")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    ctx.meta[_VERBOSE] = verbose


@app.command()
def train(
    ctx: typer.Context,
    config: ConfigFile,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print plugins and batch arithmetic, start nothing.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, if there is one.")
    ] = False,
    allow_plugin_drift: Annotated[
        bool, typer.Option("--allow-plugin-drift", help="Resume although plugin versions have changed.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log more; show the traceback of an error.")] = False,
) -> None:
    """Train as a YAML file says."""
    from agentrl_core.cli.train import run

    ctx.meta[_VERBOSE] = verbose or ctx.meta[_VERBOSE]
    overrides = [*(overrides or []), *(["plugins.allow_drift=true"] if allow_plugin_drift else [])]
    run(config=config, overrides=overrides, dry_run=dry_run, resume=resume, verbose=ctx.meta[_VERBOSE])


@app.command("eval")
def evaluate(
    config: ConfigFile,
    overrides: Overrides = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Directory of a checkpoint; without it: the model of the file.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="New directory for metrics and trajectories.", show_default="OUTPUT_DIR/NAME.eval/<n> of the trainer"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the metrics as JSON.")] = False,
) -> None:
    """Validate a model or a checkpoint."""
    from agentrl_core.cli.evaluate import run

    run(config=config, overrides=overrides or [], checkpoint=checkpoint, output=output, as_json=as_json)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="Directory of a checkpoint.", show_default=False)],
    output: Annotated[Path, typer.Argument(help="Directory to write.", show_default=False)],
) -> None:
    """Make a directory of a checkpoint that transformers loads."""
    from agentrl_core.cli.export import run

    run(checkpoint=checkpoint, output=output)


@app.command()
def doctor(
    model: Annotated[
        Path | None, typer.Option(help="Directory of a model: also check its chat template and memory.")
    ] = None,
) -> None:
    """Compare what is installed with the tested versions."""
    from agentrl_core.cli.doctor import run

    run(model=model)


@rollouts_app.command("show")
def show_rollouts(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run.", show_default=False)],
    step: Annotated[int | None, typer.Option(help="Step; without it: the newest.")] = None,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="How many trajectories.")] = 1,
    validation: Annotated[bool, typer.Option("--validation", help="Those of the validation.")] = False,
    color: Annotated[
        bool | None, typer.Option("--color/--no-color", help="By default: where the output is a terminal.")
    ] = None,
) -> None:
    """Print decoded trajectories: mask in colour, tool calls, reward."""
    from agentrl_core.cli.rollouts import show

    show(run_dir=run_dir, step=step, count=count, validation=validation, color=color)


@reward_app.callback()
def reward_group() -> None:
    """A callback keeps `replay` a subcommand although it is the only one."""


@reward_app.command("replay")
def replay_reward(
    rollouts: Annotated[Path, typer.Argument(help="File rollouts/step-….jsonl of a run.", show_default=False)],
    reward: Annotated[
        str, typer.Option(help="A reward function: its name, or ./file.py:function.", show_default=False)
    ],
    config: Annotated[
        Path | None, typer.Option(help="Configuration whose reward.functions has it, with its options.")
    ] = None,
    show_all: Annotated[
        bool, typer.Option("--all", help="Print every trajectory, not only the first 20 whose score changed.")
    ] = False,
) -> None:
    """Score trajectories that a run wrote once more, in this process, so that breakpoint() works."""
    from agentrl_core.cli._output import console_of_stdout
    from agentrl_core.devtools.reward_replay import replay

    replay(rollouts, reward, config, console_of_stdout(), show_all)


def main() -> None:
    """Entry point of the ``agentrl`` script."""
    app()


@runs_app.callback()
def runs_group() -> None:
    """A callback keeps `list` a subcommand although it is the only one."""


@runs_app.command("list")
def list_runs(
    folder: Annotated[Path, typer.Argument(help="Directory with runs: trainer.output_dir.")] = Path("runs"),
) -> None:
    """Print each run's status, step, reward and accuracy."""
    from agentrl_core.cli.runs import show_runs

    show_runs(folder)


def _plugin_commands() -> dict[str, list[Any]]:
    from agentrl_core.plugins.registration import cli_registrations

    commands: dict[str, list[Any]] = {}
    for registration in cli_registrations():
        commands.setdefault(registration.name, []).append(registration)
    return commands


def _fail(ctx: Any, error: Exception) -> None:
    from agentrl_core.cli._output import exit_code, print_error

    print_error(error, verbose=bool(ctx.meta.get(_VERBOSE)))
    raise typer.Exit(exit_code(error))


if __name__ == "__main__":
    main()
