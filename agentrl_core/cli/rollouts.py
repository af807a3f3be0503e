"""``agentrl rollouts show``: trajectories that a run wrote, decoded, without its model or tokenizer."""

from collections import Counter
from itertools import islice
from pathlib import Path

from rich.console import Console

from agentrl_core.api.dataset import Split
from agentrl_core.api.errors import DataError
from agentrl_core.runs.records import read_rollouts
from agentrl_core.runs.run_dir import RunDir
from agentrl_core.runs.trajectory_view import legend, show_trajectory


def show(run_dir: Path, step: int | None, count: int, validation: bool, color: bool | None) -> None:
    """Print the first ``count`` trajectories of a step on standard output.

    Args:
        run_dir: ``runs/<name>``.
        step: of the run; None: the newest that is on disk.
        count: how many trajectories.
        validation: those of the validation at that step rather than those of training.
        color: None: where standard output is a terminal.

    Raises:
        DataError: no such directory, step or readable record; names what there is.
    """
    split: Split = "validation" if validation else "train"
    run = RunDir(run_dir)
    path = run.rollout_file(_found_step(run, step, split), split)
    records = list(islice(read_rollouts(path), count))
    if not records:
        raise DataError(f"{path}: holds no trajectory")
    console = _console(color)
    console.print(legend(console))
    rows: Counter[str] = Counter()
    for record in records:
        rows[record.trajectory_id] += 1
        show_trajectory(record, console, branch=rows[record.trajectory_id])


def _console(color: bool | None) -> Console:
    if color is None:
        return Console()
    if not color:
        return Console(color_system=None)
    return Console(force_terminal=True, color_system="standard", no_color=False)


def _found_step(run: RunDir, step: int | None, split: Split) -> int:
    if not run.path.is_dir():
        runs = _runs_beside(run.path)
        there = f"there are {', '.join(runs)}" if runs else "no run lies beside it"
        raise DataError(f"{run.path}: no such run directory; in {run.path.parent} {there}")
    steps = run.rollout_steps(split)
    if not steps:
        others = run.rollout_steps("train" if split == "validation" else "validation")
        hint = f"; there are {_OTHERS[split]}" if others else "; were they written (trainer.save_rollouts=true)?"
        raise DataError(f"{run.rollouts_dir}: no {split} rollouts{hint}")
    if step is None:
        return steps[-1]
    if step not in steps:
        raise DataError(f"{run.rollouts_dir}: no {split} rollouts of step {step}; there are steps {_ranges(steps)}")
    return step


_OTHERS: dict[Split, str] = {
    "train": "validation rollouts: add --validation",
    "validation": "training rollouts: leave out --validation",
}


def _runs_beside(path: Path) -> list[str]:
    if not path.parent.is_dir():
        return []
    return sorted(str(entry) for entry in path.parent.iterdir() if (entry / "rollouts").is_dir())


def _ranges(steps: list[int]) -> str:
    """``1-4, 6, 8-20``."""
    ranges: list[tuple[int, int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], step)
        else:
            ranges.append((step, step))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
