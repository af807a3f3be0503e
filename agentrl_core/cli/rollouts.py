"""``agentrl rollouts show``."""

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agentrl_core.api.dataset import Split
from agentrl_core.api.errors import DataError
from agentrl_core.cli._shared import command_group, warn
from agentrl_core.runs.records import read_rollouts, to_json
from agentrl_core.runs.run_dir import RunDir, ranges
from agentrl_core.runs.trajectory_view import legend, show_trajectory

app = command_group()


@app.command()
def show(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run.", show_default=False)],
    step: Annotated[int | None, typer.Option(help="Step. By default: the newest.")] = None,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="Number of trajectories.")] = 1,
    validation: Annotated[bool, typer.Option("--validation", help="Show validation trajectories.")] = False,
    color: Annotated[
        bool | None, typer.Option("--color/--no-color", help="By default: color if the output is a terminal.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: the rows of the trajectories.")] = False,
) -> None:
    """Print decoded trajectories: mask in color, tool calls, reward."""
    split: Split = "validation" if validation else "train"
    run = RunDir(run_dir)
    path = run.rollout_file(found_step(run, step, split), split)
    records = list(islice(read_rollouts(path), count))
    if not records:
        raise DataError(f"{path}: holds no trajectory")
    if as_json:
        trajectories = [json.loads(to_json(record.content)) for record in records]
        typer.echo(json.dumps({"schema_version": 1, "trajectories": trajectories}, indent=2))
        return
    console = Console(color_system=None) if color is False else Console()
    if color:
        console = Console(force_terminal=True, color_system="standard", no_color=False)
    console.print(legend(console))
    rows: Counter[str] = Counter()
    for record in records:
        rows[record.trajectory_id] += 1
        show_trajectory(record, console, branch=rows[record.trajectory_id])


def found_step(run: RunDir, step: int | None, split: Split) -> int:
    """The step of ``--step``, or the newest one; warns where a run recorded a sample only.

    Raises:
        DataError: there is no such run, or it has no rollouts of this step.
    """
    if not run.path.is_dir():
        runs = _runs_next_to(run.path)
        there = f"there are {', '.join(runs)}" if runs else "no other run is there"
        raise DataError(f"{run.path}: no such run directory; in {run.path.parent} {there}")
    steps = run.rollout_steps(split)
    if not steps:
        others = run.rollout_steps("train" if split == "validation" else "validation")
        hint = f"; there are {_OTHERS[split]}" if others else ""
        reason = f". {run.unrecorded}" if run.unrecorded else ""
        raise DataError(f"{run.rollouts_dir}: no {split} rollouts{hint}{reason}")
    if run.unrecorded:
        warn(run.unrecorded)
    if step is None:
        return steps[-1]
    if step not in steps:
        raise DataError(f"{run.rollouts_dir}: no {split} rollouts of step {step}; there are steps {ranges(steps)}")
    return step


_OTHERS: dict[Split, str] = {
    "train": "validation rollouts: add --validation",
    "validation": "training rollouts: leave out --validation",
}


def _runs_next_to(path: Path) -> list[str]:
    if not path.parent.is_dir():
        return []
    return sorted(str(entry) for entry in path.parent.iterdir() if (entry / "rollouts").is_dir())
