"""``agentrl runs list`` and ``runs compare``."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from agentrl_core.api.errors import DataError
from agentrl_core.cli._shared import Json, command_group, console_of_stdout, new_table, warn
from agentrl_core.config.nodes import dotted, read_file
from agentrl_core.config.writing import leaves
from agentrl_core.runs.atomic import open_file
from agentrl_core.runs.run_dir import RunDir, is_number

SCHEMA_VERSION = 1
_COMPARED = "reward/mean", "response_length/mean", "perf/tokens_per_second"
_NAMES = "trainer.name", "trainer.resume"
"""Keys that differ without making a difference."""

app = command_group("List and compare runs.")


@app.command("list")
def list_runs(
    folder: Annotated[Path, typer.Argument(help="Directory of runs: trainer.output_dir.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """Print each run's status, step, reward and accuracy, the newest first."""
    runs = [RunDir(entry) for entry in (folder.iterdir() if folder.is_dir() else ())]
    # A run that lost its state is still one.
    runs = [run for run in runs if os.path.lexists(run.state_file) or run.checkpoints_dir.is_dir()]
    if not runs:
        raise DataError(f"{folder}: holds no run. Give a directory of runs, such as trainer.output_dir")
    found = sorted((_about(run) for run in runs), key=lambda about: str(about["written"]), reverse=True)
    for about in found:
        for problem in about["problems"]:
            warn(problem)
    if as_json:
        typer.echo(json.dumps({"schema_version": SCHEMA_VERSION, "runs": found}, indent=2))
        return
    numbers = "STEP", "REWARD", "ACCURACY"
    table = new_table("RUN", "STATUS", *numbers, "WRITTEN", right=numbers)
    for run in found:
        written = run["written"][:16].replace("T", " ")
        step = "-" if run["step"] is None else str(run["step"])
        table.add_row(run["run"], run["status"], step, _shown(run["reward"]), _shown(run["accuracy"]), written)
    console_of_stdout().print(table)


def _about(run: RunDir) -> dict[str, Any]:
    last: dict[str, Any] = {}
    try:
        state, problems = run.read_state(), run.lost_records()
        for row in run.read_metrics():
            last |= row
        if state is None:
            problems = [f"{run.state_file} is missing, so the status of this run is unknown"]
    except (DataError, OSError) as error:
        # The other runs are listed all the same.
        state, problems = None, [str(error)]
    return {
        "run": str(run.path),
        "status": run.shown_status() if state else "damaged",
        "step": state.step if state else None,
        "reward": last["reward/mean"] if is_number(last.get("reward/mean")) else None,
        "accuracy": _mean_accuracy(last),
        "written": state.time if state else "",
        "problems": problems,
    }


def _mean_accuracy(row: Mapping[str, Any]) -> float | None:
    """The mean over data sources: of greedy answers where there are any, else of sampled ones."""
    for mode in ("greedy", "sampled"):
        found = [value for name, value in row.items() if name.endswith(f"/accuracy_{mode}") and is_number(value)]
        if found:
            return sum(found) / len(found)
    return None


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="Directories of runs.", show_default=False)],
    metrics: Annotated[
        list[str] | None, typer.Option("--metric", help="Compare this metric too; may be repeated.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print which configuration values differ, and the last and the highest value of the main metrics."""
    if len(runs) < 2:
        raise typer.BadParameter("expected two runs or more", param_hint="RUN")
    opened = [RunDir(path) for path in runs]
    for run in opened:
        if not os.path.lexists(run.config_file):
            raise DataError(
                f"{run.path}: no such run, or its config.yaml is missing. `agentrl runs list` shows the runs of a "
                "directory"
            )
        open_file(run.config_file).close()
        for problem in run.lost_records():
            warn(problem)
    configs = [_configuration(run) for run in opened]
    rows = [run.read_metrics() for run in opened]
    keys = dict.fromkeys(key for config in configs for key in config if key not in _NAMES)
    values = {key: [config.get(key) for config in configs] for key in keys}
    differing = {key: each for key, each in values.items() if any(other != each[0] for other in each)}
    points = {name: [_points(each, name) for each in rows] for name in _names(rows, metrics or [])}
    names = [str(run.path) for run in opened]
    if as_json:
        typer.echo(
            json.dumps(
                {"schema_version": SCHEMA_VERSION, "runs": names, "config": differing, "metrics": points}, indent=2
            )
        )
        return
    table = new_table("", *names, right=names)
    for key, found in differing.items():
        table.add_row(key, *("-" if value is None else str(value) for value in found))
    if not differing:
        table.add_row("no configuration value differs")
    table.add_section()
    for name, of_runs in points.items():
        for which in ("last", "highest"):
            table.add_row(f"{name} ({which})", *(_point(each[which]) for each in of_runs))
    console_of_stdout().print(table)


def _configuration(run: RunDir) -> dict[str, Any]:
    tree = read_file(run.config_file, str(run.config_file)).plain()
    return {dotted(path): value for path, value in leaves(tree)}


def _names(runs: Iterable[list[dict[str, Any]]], wanted: list[str]) -> list[str]:
    logged = dict.fromkeys(name for rows in runs for row in rows for name in row)
    unknown = [name for name in wanted if name not in logged]
    if unknown:
        raise DataError(f"--metric {unknown[0]}: no run logged it; allowed are {', '.join(sorted(logged))}")
    accuracies = sorted(name for name in logged if "/accuracy_" in name)
    return list(dict.fromkeys([*(name for name in _COMPARED if name in logged), *accuracies, *wanted]))


def _points(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The last value and the highest one, each with its step; None for a run that didn't log it."""
    points = [{"step": row["step"], "value": row[name]} for row in rows if is_number(row.get(name))]
    return {
        "last": points[-1] if points else None,
        "highest": max(points, key=lambda point: float(point["value"])) if points else None,
    }


def _point(point: dict[str, Any] | None) -> str:
    return "-" if point is None else f"{point['value']:.4g} at step {point['step']}"


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
