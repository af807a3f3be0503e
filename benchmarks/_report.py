"""Figures of a benchmark as a table and as JSON."""

import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from rich.console import Console
from rich.table import Table

NOTE = "Others may use the machine at the same time: compare figures of one run with each other, and repeat a run."

_WIDTH_OF_A_PIPE = 250


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


def report(title: str, figures: Iterable[Figure], path: Path | None = None) -> list[Figure]:
    """Take figures as they are measured; print them when the last one has come, or a part has failed.

    Args:
        figures: a generator that measures.
        path: a file that has those so far as JSON, from the first one on.
    """
    taken: list[Figure] = []
    try:
        for figure in figures:
            taken.append(figure)
            if path is not None:
                write_json(path, taken)
    finally:
        if taken:
            print_figures(title, taken)
    return taken


def print_figures(title: str, figures: Sequence[Figure]) -> None:
    """A table on stdout; lines of one case stand together."""
    table = Table(title=title, title_justify="left", caption=NOTE, caption_justify="left")
    # Where there is too little room, words are folded; a number is never cut.
    table.add_column("case", overflow="fold")
    table.add_column("figure", overflow="fold")
    cells = [(value_of(figure), goal_of(figure), figure.verdict) for figure in figures]
    for name, column in zip(("value", "goal", ""), zip(*cells, strict=True), strict=True):
        table.add_column(name, justify="right", no_wrap=True, min_width=max(map(len, (name, *column))))
    for number, figure in enumerate(figures):
        is_first = number == 0 or figures[number - 1].case != figure.case
        if is_first and number:
            table.add_section()
        table.add_row(figure.case if is_first else "", figure.name, *cells[number])
    Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_PIPE).print(table)


def value_of(figure: Figure) -> str:
    """The value with its unit."""
    is_small = 0 < abs(figure.value) < 0.01
    return f"{figure.value:{'.1e' if is_small else '.2f'}} {figure.unit}".strip()


def goal_of(figure: Figure) -> str:
    """``≤ 5``; empty without a goal."""
    return (
        ""
        if figure.goal is None
        else f"{'≥' if figure.at_least else '≤'} {figure.goal:{'.3g' if abs(figure.goal) < 1 else 'g'}}"
    )


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
        cells = (figure.case, figure.name, value_of(figure), goal_of(figure), figure.verdict)
        lines.append(f"| {' | '.join(cells)} |")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _machine() -> str:
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cpus"
