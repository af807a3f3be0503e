"""Learning curves as PNG files: the reward of training and the accuracy of validation over the steps."""

import os
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from agentrl_core.api import DataError
from agentrl_trackers_basic.metrics import (
    Accuracy,
    ValidationMode,
    is_number,
    mean_accuracies,
    read_metrics,
    validation_accuracies,
)

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
"""Okabe and Ito's palette, which colour-blind readers can tell apart."""

_MODE_STYLES: dict[ValidationMode, tuple[str, str]] = {"greedy": ("-", "o"), "sampled": ("--", "s")}

_Points = list[tuple[int, float]]


def draw_curve(metrics_file: Path, png_path: Path, title: str) -> Path:
    """Draw one run: reward per step, and every validation accuracy; returns ``png_path``.

    Rewards that leave 0..1 get their own panel above the accuracies.

    Raises:
        DataError: the file is absent, or holds neither a reward nor a validation.
    """
    rows = _rows(metrics_file)
    reward = _reward(rows)
    accuracies = _accuracies(rows)
    inside = all(-0.02 <= value <= 1.02 for _, value in reward)
    stacked = bool(reward) and bool(accuracies) and not inside
    figure = Figure(figsize=(8, 6.5 if stacked else 4.5), dpi=150, layout="constrained")
    axes = list(figure.subplots(2 if stacked else 1, 1, squeeze=False, sharex=True)[:, 0])
    figure.suptitle(title, fontsize=13, fontweight="bold")
    if reward:
        _draw_reward(axes[0], reward)
    _draw_accuracies(axes[-1], accuracies)
    for each in axes:
        _finish(each)
        each.legend(frameon=False, fontsize=9)
    if accuracies:
        axes[-1].set_ylim(-0.03, 1.03)
        axes[-1].set_ylabel("accuracy" if stacked or not reward else "reward, accuracy")
    if reward and (stacked or not accuracies):
        axes[0].set_ylabel("reward")
    axes[-1].set_xlabel("step")
    return _save(figure, png_path)


def draw_curves(metrics_files: Mapping[str, Path], png_path: Path, title: str = "") -> Path:
    """Draw several runs, such as seeds, side by side by label: reward, sampled and greedy accuracy; returns the path.

    Accuracies are averaged over data sources.

    Raises:
        DataError: a file is absent or empty; names it.
    """
    panels: dict[str, dict[str, _Points]] = {}
    for label, metrics_file in metrics_files.items():
        rows = _rows(metrics_file)
        panels.setdefault("training reward", {})[label] = _reward(rows)
        for mode in ("sampled", "greedy"):
            points = [(row["step"], means[mode]) for row in rows if mode in (means := mean_accuracies(row))]
            panels.setdefault(f"validation accuracy, {mode}", {})[label] = points
    panels = {name: runs for name, runs in panels.items() if any(runs.values())}
    if not panels:
        raise DataError("draw_curves: no metrics files were given; allowed is at least one, by its label")
    figure = Figure(figsize=(4.2 * len(panels) + 0.6, 4.2), dpi=150, layout="constrained")
    axes = list(figure.subplots(1, len(panels), squeeze=False)[0])
    if title:
        figure.suptitle(title, fontsize=13, fontweight="bold")
    for each, (name, runs) in zip(axes, panels.items(), strict=True):
        for number, (label, points) in enumerate(runs.items()):
            colour = _COLOURS[number % len(_COLOURS)]
            each.plot(*_xy(points), color=colour, marker="o", markersize=3.5, linewidth=1.8, label=label)
        each.set_title(name, fontsize=11)
        each.set_xlabel("step")
        _finish(each)
        if all(-0.02 <= value <= 1.02 for points in runs.values() for _, value in points):
            each.set_ylim(-0.03, 1.03)
    axes[0].legend(frameon=False, fontsize=9)
    return _save(figure, png_path)


def _rows(metrics_file: Path) -> list[dict[str, Any]]:
    if not metrics_file.exists():
        raise DataError(f"{metrics_file}: no such file; allowed is the metrics.jsonl of a run")
    rows = read_metrics(metrics_file)
    if not any(_reward([row]) or validation_accuracies(row) for row in rows):
        raise DataError(f"{metrics_file}: found {len(rows)} steps without reward/mean and without validation accuracy")
    return rows


def _reward(rows: Sequence[Mapping[str, Any]]) -> _Points:
    return [(row["step"], row["reward/mean"]) for row in rows if is_number(row.get("reward/mean"))]


def _accuracies(rows: Sequence[Mapping[str, Any]]) -> dict[Accuracy, _Points]:
    series: dict[Accuracy, _Points] = {}
    for row in rows:
        for accuracy, value in validation_accuracies(row).items():
            series.setdefault(accuracy, []).append((row["step"], value))
    return series


def _draw_reward(axes: Axes, reward: _Points) -> None:
    axes.plot(*_xy(reward), color="#8a8a8a", linewidth=1.6, marker=".", label="reward, mean of the training batch")


def _draw_accuracies(axes: Axes, accuracies: Mapping[Accuracy, _Points]) -> None:
    sources = sorted({accuracy.source for accuracy in accuracies})
    for accuracy in sorted(accuracies):
        points = accuracies[accuracy]
        style, marker = _MODE_STYLES[accuracy.mode]
        colour = _COLOURS[sources.index(accuracy.source) % len(_COLOURS)]
        label = f"validation accuracy, {accuracy.mode}" + (f" ({accuracy.source})" if len(sources) > 1 else "")
        axes.plot(*_xy(points), style, color=colour, marker=marker, markersize=5, linewidth=2, label=label)
        if len(accuracies) <= 2:
            (other,) = [dict(accuracies[each]) for each in accuracies if each != accuracy] or [{}]
            _annotate(axes, points, other, wins_ties=accuracy.mode == "greedy")


def _annotate(axes: Axes, points: _Points, other: Mapping[int, float], *, wins_ties: bool) -> None:
    for step, value in dict.fromkeys([points[0], points[-1]]):
        # The other curve may have a label at this step too.
        above = value > other.get(step, -inf) or (value == other[step] and wins_ties)
        axes.annotate(
            f"{value:.2f}", (step, value), xytext=(0, 8 if above else -15), textcoords="offset points",
            ha="center", fontsize=9,
        )  # fmt: skip


def _finish(axes: Axes) -> None:
    axes.grid(True, color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def _xy(points: _Points) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]


def _save(figure: Figure, png_path: Path) -> Path:
    FigureCanvasAgg(figure)
    png_path.parent.mkdir(parents=True, exist_ok=True)
    temporary = png_path.with_name(f".{png_path.name}.tmp")
    figure.savefig(temporary, format="png")
    os.replace(temporary, png_path)
    return png_path
