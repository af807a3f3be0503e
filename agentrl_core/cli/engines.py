"""``agentrl engines setup`` and ``agentrl engines bench``."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from agentrl_core.api.errors import AgentRLError
    from agentrl_core.devtools.engine_bench import EngineFigures

app = typer.Typer(help="Engines: their environments, and how fast and exact they are.", no_args_is_help=True)


@app.command("setup")
def setup_engine(
    name: Annotated[str, typer.Argument(help="Of the engine, such as vllm.", show_default=False)],
    path: Annotated[Path | None, typer.Option(help="Folder of the environment.", show_default=".engines/NAME")] = None,
    requirements: Annotated[
        list[str] | None, typer.Option("--with", help="Install this too, such as 'vllm==0.32.1'; may be repeated.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands only.")] = False,
) -> None:
    """Make the environment in which an engine runs beside the trainer's own, and print its interpreter."""
    from agentrl_core.plugins.resolution import resolve
    from agentrl_core.serving.environment import setup_commands, setup_environment

    plugin = resolve("engine", name)
    folder = (path or Path(".engines") / plugin.spec.name).absolute()
    if dry_run:
        for command in setup_commands(plugin, folder, requirements or []):
            typer.echo(shlex.join(command))
        return
    python = setup_environment(
        plugin, folder, requirements or [], lambda command: typer.echo(f"+ {shlex.join(command)}", err=True)
    )
    typer.echo(f"rollout.engine.name={name} rollout.engine.python={python}")


@app.command("bench")
def bench_engines(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Values that replace those of the file.", show_default=False),
    ] = None,
    engines: Annotated[
        list[str] | None,
        typer.Option("--engine", help="NAME or NAME=INTERPRETER; may be repeated. Without it: that of the file."),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="How many answers.")] = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests on their way at a time.")] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Start each engine on the model, and print start-up time, speed, log-prob gap and memory.

    Ends with code 1 if one does not start.
    """
    from agentrl_core.cli import _logging

    _logging.setup(stderr=as_json)
    failed = _bench(config, overrides or [], engines or [], requests, concurrency, as_json)
    if failed:
        raise typer.Exit(1)


def _bench(
    config: Path, overrides: Sequence[str], engines: Sequence[str], requests: int, concurrency: int, as_json: bool
) -> bool:
    import json
    from dataclasses import asdict

    from agentrl_core.api.errors import AgentRLError
    from agentrl_core.config import load_config
    from agentrl_core.devtools.engine_bench import EngineFigures, measure_engine

    found: dict[str, EngineFigures | AgentRLError] = {}
    for engine in engines or [""]:
        changes = [*overrides, *_engine_overrides(engine)]
        try:
            loaded = load_config(config, changes)
            engine = engine or loaded.rollout.engine.name
            found[engine] = measure_engine(loaded, requests, concurrency)
        except AgentRLError as error:
            if len(engines) < 2:
                raise
            found[engine] = error
    if as_json:
        rows = {
            name: {"error": str(each)}
            if isinstance(each, AgentRLError)
            else {**asdict(each), "tokens_per_second": each.tokens_per_second}
            for name, each in found.items()
        }
        typer.echo(json.dumps(rows, indent=2))
    else:
        _print(found)
    return any(isinstance(each, AgentRLError) for each in found.values())


def _engine_overrides(engine: str) -> list[str]:
    name, _, python = engine.partition("=")
    if not name:
        return []
    # An interpreter of the file's own engine is not that of another one; engines outside of this process need Ray.
    where = [f"rollout.engine.python={python}", "cluster.runtime=ray"] if python else ["rollout.engine.python=null"]
    return [f"rollout.engine.name={name}", *where]


def _print(found: "dict[str, EngineFigures | AgentRLError]") -> None:
    from rich.table import Table
    from rich.text import Text

    from agentrl_core.api.errors import AgentRLError
    from agentrl_core.cli._output import console_of_stdout

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("ENGINE", "START", "TOKENS/S", "GAP MEAN", "GAP MAX", "MEMORY"):
        table.add_column(column, justify="left" if column == "ENGINE" else "right")
    console = console_of_stdout()
    for name, each in found.items():
        if isinstance(each, AgentRLError):
            table.add_row(name, Text("failed", style="bold red"))
            continue
        gaps = ["-" if gap is None else f"{gap:.1e}" for gap in (each.gap_mean, each.gap_max)]
        memory = "-" if each.memory_bytes is None else f"{each.memory_bytes / 2**30:.2f} GiB"
        table.add_row(name, f"{each.start_seconds:.1f} s", f"{each.tokens_per_second:,.0f}", *gaps, memory)
    console.print(table)
    for name, each in found.items():
        if isinstance(each, AgentRLError):
            console.print(Text(f"\n{name}: {each}"), soft_wrap=True)
