"""Figures of a benchmark as a table and as JSON."""

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from rich.console import Console
from rich.table import Table

NOTE = "Others may use the machine at the same time: compare figures of one run with each other, and repeat a run."


@dataclass(frozen=True)
class Figure:
    """One measured value; ``goal`` is the largest value that passes (``at_least``: the smallest), None: no goal."""

    case: str
    name: str
    value: float
    unit: str
    goal: float | None = None
    at_least: bool = False

    @property
    def verdict(self) -> str:
        if self.goal is None:
            return ""
        reached = self.value >= self.goal if self.at_least else self.value <= self.goal
        return "pass" if reached else "miss"


def print_figures(title: str, figures: Sequence[Figure]) -> None:
    """A table on stdout; lines of one case stand together."""
    table = Table(title=title, title_justify="left", caption=NOTE, caption_justify="left")
    table.add_column("case", no_wrap=True)
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right")
    table.add_column("goal", justify="right")
    table.add_column("")
    for number, figure in enumerate(figures):
        is_first = number == 0 or figures[number - 1].case != figure.case
        if is_first and number:
            table.add_section()
        goal = "" if figure.goal is None else f"{'≥' if figure.at_least else '≤'} {figure.goal:g}"
        table.add_row(
            figure.case if is_first else "",
            figure.name,
            f"{figure.value:.2f} {figure.unit}".strip(),
            goal,
            figure.verdict,
        )
    Console(width=110).print(table)


def write_json(path: Path, figures: Sequence[Figure]) -> None:
    """The figures with their verdicts, and what they were measured on."""
    document = {
        "python": sys.version.split()[0],
        "machine": _machine(),
        "note": NOTE,
        "figures": [{**asdict(figure), "verdict": figure.verdict} for figure in figures],
    }
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def write_markdown(path: Path, title: str, command: str, figures: Sequence[Figure]) -> None:
    """The figures as a page with the command that makes them."""
    lines = [f"# {title}", "", f"`{command}`, {date.today()}, {_machine()}, Python {sys.version.split()[0]}.", ""]
    lines += ["| case | figure | value | goal | |", "|---|---|---|---|---|"]
    for figure in figures:
        goal = "" if figure.goal is None else f"{'≥' if figure.at_least else '≤'} {figure.goal:g}"
        value = f"{figure.value:.2f} {figure.unit}".strip()
        lines.append(f"| {figure.case} | {figure.name} | {value} | {goal} | {figure.verdict} |")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _machine() -> str:
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cpus"
