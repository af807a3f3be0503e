"""``agentrl init``."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from agentrl_core.api.errors import ConfigError

Several = list[str] | None


def run(
    folder: Annotated[Path, typer.Argument(help="New folder for the task, or an existing one.")] = Path("."),
    model: Annotated[
        str | None, typer.Option(help="A directory, or a name on the Hugging Face hub.", show_default=False)
    ] = None,
    data: Annotated[Several, typer.Option(help="A file of rows; may be repeated. By default: an example.")] = None,
    tool: Annotated[Several, typer.Option(help="./file.py:function, or a tool's name; may be repeated.")] = None,
    reward: Annotated[
        Several, typer.Option(help="./file.py:function, or a reward's name; may be repeated. By default: an example.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="hf, vllm or sglang.", show_default="hf")] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="Name of an advantage estimator or a policy loss.", show_default="grpo")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
) -> None:
    """Write a commented config.yaml for your model, data, tool and reward; on a terminal, ask for what is missing."""
    from agentrl_core.devtools.starter import Start, write_start

    if model is None and not sys.stdin.isatty():
        raise ConfigError("--model is missing: give a directory, or a hub name such as Qwen/Qwen3-0.6B")
    if model is None:
        model = typer.prompt("Model (a directory, or a name on the Hugging Face hub)", err=True)
        data = data or _asked("File of rows (empty: write an example)")
        tool = tool or _asked("Tool (./file.py:function or a name; empty: none, or the example's)")
        reward = reward or _asked("Reward (./file.py:function or a name; empty: write an example)")
        engine = engine or typer.prompt("Engine", default="hf", err=True)
        algorithm = algorithm or typer.prompt("Algorithm", default="grpo", err=True)
    start = Start(model, data or (), tool or (), reward or (), engine or "hf", algorithm or "grpo")
    written = write_start(start, folder, force)
    typer.echo(f"wrote {', '.join(map(str, written))}. Next:")
    typer.echo(f"  agentrl train {written[0]} --dry-run")


def _asked(question: str) -> list[str]:
    return str(typer.prompt(question, default="", show_default=False, err=True)).split()
