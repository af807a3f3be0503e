"""``agentrl from-verl``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
import yaml

from agentrl_compat_verl.conversion import Conversion
from agentrl_compat_verl.convert import convert
from agentrl_compat_verl.reading import read

app = typer.Typer(add_completion=False)


@app.command()
def from_verl(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE_OR_OVERRIDE...",
            help="Shell scripts, YAML files and key=value of verl; later ones win.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the configuration; default: standard output.")
    ] = None,
) -> None:
    """Convert a verl configuration; print to standard error what became of each key.

    Exit code 1: the configuration is written, but lacks something without which it is another task.
    """
    result = convert(read(sources))
    text = yaml.safe_dump(result.tree, sort_keys=False)
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(text, encoding="utf-8")
    typer.echo(report(result), nl=False, err=True)
    if result.incomplete:
        raise typer.Exit(1)


def report(result: Conversion) -> str:
    """What became of verl's keys, by kind."""
    parts: tuple[tuple[str, Mapping[str, str]], ...] = (
        ("Converted", result.converted),
        ("Added, because verl's default differs from agentrl's", result.added),
        ("Not needed", result.default),
        ("No counterpart", result.missing),
        ("To decide", result.decisions),
        ("INCOMPLETE, the configuration is not the same task", result.incomplete),
    )
    return "".join(
        f"{title} ({len(lines)}):\n" + "".join(f"  {key}: {text}\n" for key, text in lines.items())
        for title, lines in parts
        if lines
    )
