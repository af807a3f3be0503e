"""``agentrl runs list``."""

from pathlib import Path
from typing import Any

from rich.table import Table

from agentrl_core.api.errors import DataError
from agentrl_core.cli._output import console_of_stdout
from agentrl_core.runs.metrics import is_number
from agentrl_core.runs.run_dir import RunDir

_ACCURACY = "/accuracy_"


def show_runs(folder: Path) -> None:
    """Print the runs of a directory, the one written last first.

    Raises:
        DataError: there are none.
    """
    runs = [RunDir(entry) for entry in (folder.iterdir() if folder.is_dir() else ())]
    runs = [run for run in runs if run.state_file.is_file()]
    if not runs:
        raise DataError(f"{folder}: no run is there; expected a directory such as trainer.output_dir (runs)")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("RUN", "STATUS", "STEP", "REWARD", "ACCURACY", "WRITTEN"):
        table.add_column(column, justify="right" if column in ("STEP", "REWARD", "ACCURACY") else "left")
    for run in sorted(runs, key=lambda run: run.state_file.stat().st_mtime, reverse=True):
        state = run.read_state()
        assert state is not None, "runs without a state are left out"
        last: dict[str, Any] = {}
        for row in run.read_metrics():
            last |= row
        rewards = [last["reward/mean"]] if is_number(last.get("reward/mean")) else []
        accuracies = [value for name, value in last.items() if _ACCURACY in name and is_number(value)]
        table.add_row(
            str(run.path), run.shown_status(), str(state.step), _mean(rewards), _mean(accuracies),
            state.time[:16].replace("T", " "),
        )  # fmt: skip
    console_of_stdout().print(table)


def _mean(values: list[float]) -> str:
    return f"{sum(values) / len(values):.2f}" if values else "-"
