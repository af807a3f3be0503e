"""``agentrl openenv-trace``."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Write and read OpenEnv's TrainingTrace.")


@app.command()
def write(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="ROLLOUTS... OUTPUT", help="Files RUN/rollouts/step-….jsonl, and the new .jsonl file."),
    ],
) -> None:
    """Write the trajectories of a run as traces, one in each line."""
    from agentrl_env_openenv.traces import traces

    *files, output = _split(paths)
    _save(output, (trace for file in files for trace in traces(file)), "traces", "failed, or hold nothing sampled")


@app.command()
def read(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="TRACES... OUTPUT", help="Files of traces (.json, .jsonl), and the new .jsonl file."),
    ],
    reward: Annotated[
        float | None, typer.Option(help="Reward of a trace whose metadata has none; default: reward.functions score.")
    ] = None,
) -> None:
    """Write traces as data rows, which the agent loop `training_trace` plays token by token."""
    from agentrl_env_openenv.traces import read_lines, row

    *files, output = _split(paths)
    rows = (row(place, trace, reward) for file in files for place, trace in read_lines(file))
    _save(output, rows, "rows", "have no token to train")


def _split(paths: list[Path]) -> list[Path]:
    if len(paths) < 2:
        raise typer.BadParameter("give at least one file to read, and then the file to write")
    if paths[-1].exists():
        raise typer.BadParameter(f"{paths[-1]} exists; name a new file, so that nothing is overwritten")
    return paths


def _save(output: Path, found: Iterable[dict[str, Any] | None], what: str, why: str) -> None:
    # All of it before the file is made: bad input leaves none.
    values = list(found)
    kept = [json.dumps(value, ensure_ascii=False) + "\n" for value in values if value is not None]
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(kept), encoding="utf-8")
    typer.echo(f"{output}: {len(kept)} {what}; {len(values) - len(kept)} left out, which {why}")
