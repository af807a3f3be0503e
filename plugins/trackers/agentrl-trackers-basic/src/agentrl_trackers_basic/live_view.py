"""The panel that a terminal shows while a run goes on."""

from collections.abc import Iterable
from dataclasses import dataclass

from rich.box import ROUNDED
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentrl_trackers_basic.formatting import compact, duration, figure, percent, sparkline
from agentrl_trackers_basic.metrics import Accuracy, idle_shares, time_shares
from agentrl_trackers_basic.progress import LENGTH, REWARD, SPEED, TOOL_SHARE, Progress

MAX_WIDTH = 96
_SPARK_WIDTHS = ((80, 24), (54, 10), (0, 0))
"""Columns of a sparkline, by the columns that there are at least for everything."""
_NAME_WIDTH = 8
_BAR_WIDTH = 32
_MAX_ACCURACIES = 6

_PHASE_STYLES = {
    "rollout": "cyan",
    "score": "magenta",
    "log-probs": "yellow",
    "values": "bright_yellow",
    "advantages": "white",
    "update": "green",
    "sync": "blue",
    "validation": "bright_magenta",
    "checkpoint": "bright_blue",
    "other": "bright_black",
}
_STATUS_STYLES = {"completed": "bold green", "stopped": "bold yellow", "failed": "bold red"}


def live_view(progress: Progress, width: int, eta_clock: str = "", status: str = "") -> RenderableType:
    """The whole panel.

    Args:
        progress: of the run.
        width: columns of the terminal.
        eta_clock: time of day at which the run will be done.
        status: how the run ended; empty while it goes on.
    """
    width = min(width, MAX_WIDTH)
    inner = width - 4
    rows = [*_reward(progress), *_accuracy(progress), *_rollout(progress), *_speed(progress), *_lanes(progress)]
    spark_width = next(width for least, width in _SPARK_WIDTHS if inner >= least)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True, width=_NAME_WIDTH)
    text_width = inner - _NAME_WIDTH - 2 - (spark_width and spark_width + 2)
    table.add_column(no_wrap=True, overflow="ellipsis", max_width=text_width)
    for name, text, spark in rows:
        table.add_row(Text(name), text, *([spark.draw(spark_width)] if spark and spark_width else []))
    parts: list[RenderableType] = [_head(progress, inner, eta_clock)]
    if rows:
        parts += [Text(), table]
    parts += _time(progress, inner)
    title = Text.assemble(("agentrl", "bold cyan"), " · ", (progress.run_name, "bold default"))
    below = status or ("" if progress.overlaps else progress.going_on)
    subtitle = Text(below, style=_STATUS_STYLES.get(status, "dim")) if below else None
    return Panel(
        Group(*parts), box=ROUNDED, width=width, title=title, title_align="left", subtitle=subtitle,
        subtitle_align="right", border_style="bright_black",
    )  # fmt: skip


@dataclass(frozen=True)
class _Spark:
    """A series to be drawn beside its newest value; None as bound: that of the series."""

    values: list[float]
    style: str
    low: float | None = None
    high: float | None = None

    def draw(self, width: int) -> Text:
        return Text(sparkline(self.values, width, self.low, self.high), style=self.style)


_Row = tuple[str, Text, _Spark | None]


def _head(progress: Progress, inner: int, eta_clock: str) -> RenderableType:
    step = Text.assemble("step ", (f"{progress.step}", "bold"), f"/{progress.total_steps}")
    times = Text(f"{duration(progress.elapsed)} elapsed", style="dim")
    if progress.remaining and eta_clock:
        times.append(f" · eta {duration(progress.remaining)} ({eta_clock})")
    grid = Table.grid(padding=(0, 2))
    bar_width = min(_BAR_WIDTH, inner - len(step) - len(times) - 4)
    if bar_width < _BAR_WIDTH // 4:
        grid.add_row(step, times)
        return grid
    grid.add_row(
        step,
        ProgressBar(
            total=progress.total_steps, completed=progress.step, width=bar_width,
            complete_style="cyan", finished_style="green",
        ),
        times,
    )  # fmt: skip
    return grid


def _reward(progress: Progress) -> Iterable[_Row]:
    values = progress.series[REWARD]
    if values:
        text = Text.assemble((figure(values[-1]), "bold"))
        if "reward/std" in progress.latest:
            text.append(f" ± {figure(progress.latest['reward/std'])}")
        text.append(f"   best {figure(max(values))}", style="dim")
        yield "reward", text, _Spark(values, "green")


def _accuracy(progress: Progress) -> Iterable[_Row]:
    several = len({accuracy.source for accuracy in progress.accuracies}) > 1
    shown = sorted(progress.accuracies, key=lambda accuracy: (accuracy.source, accuracy.mode))
    for number, accuracy in enumerate(shown[:_MAX_ACCURACIES]):
        points = progress.accuracies[accuracy]
        name = "" if number else "accuracy"
        yield name, _accuracy_text(accuracy, points, several), _Spark([value for _, value in points], "magenta", 0, 1)
    if len(shown) > _MAX_ACCURACIES:
        yield "", Text(f"and {len(shown) - _MAX_ACCURACIES} more in metrics.jsonl", style="dim"), None


def _accuracy_text(accuracy: Accuracy, points: list[tuple[int, float]], several: bool) -> Text:
    (_, first), (step, last) = points[0], points[-1]
    text = Text(f"{first:.2f} → " if len(points) > 1 else "")
    text.append(f"{last:.2f}", style="bold")
    text.append(f" {accuracy.mode}" + (f" {accuracy.source}" if several else ""))
    return text.append(f"   at step {step}", style="dim")


def _rollout(progress: Progress) -> Iterable[_Row]:
    latest = progress.latest
    lengths, shares = progress.series[LENGTH], progress.series[TOOL_SHARE]
    if lengths:
        text = Text.assemble((figure(lengths[-1]), "bold"), " tokens")
        if "response_length/max" in latest:
            text.append(f"   longest {figure(latest['response_length/max'])}", style="dim")
        yield "response", text, _Spark(lengths, "yellow")
    if shares:
        text = Text.assemble((percent(shares[-1]), "bold"), " of trajectories call a tool")
        if "rollout/turns_mean" in latest:
            text.append(f"   {figure(latest['rollout/turns_mean'])} turns", style="dim")
        yield "tools", text, _Spark(shares, "cyan", 0, 1)
    if latest.get("rollout/failed_fraction", 0) > 0:
        failed = Text(f"{percent(latest['rollout/failed_fraction'])} of trajectories, left out", style="bold red")
        yield "failed", failed, None


def _speed(progress: Progress) -> Iterable[_Row]:
    speeds = progress.series[SPEED]
    if speeds:
        text = Text.assemble((compact(speeds[-1]), "bold"), " tokens/s")
        if "perf/rss_gib" in progress.latest:
            text.append(f"   {figure(progress.latest['perf/rss_gib'])} GiB of memory", style="dim")
        yield "speed", text, _Spark(speeds, "blue")


def _lanes(progress: Progress) -> Iterable[_Row]:
    """Rollout and training, where they overlap, and what share of the newest step each waited."""
    shares = idle_shares(progress.latest)
    for lane, text in progress.lanes if progress.activity else ():
        row = Text(text)
        if lane in shares:
            row.append(f"   waited {percent(shares[lane])}", style="dim")
        yield lane, row, None
    if "staleness/mean" in progress.latest:
        age, most = progress.latest["staleness/mean"], progress.latest["staleness/max"]
        yield "age", Text.assemble((figure(age), "bold"), " versions", (f"   oldest {most:.0f}", "dim")), None


def _time(progress: Progress, inner: int) -> list[RenderableType]:
    shares = time_shares(progress.latest)
    if not shares:
        return []
    bar, legend = Text(), []
    reached = 0.0
    for label, share in shares.items():
        style = _PHASE_STYLES[label]
        cells = round((reached + share) * inner) - round(reached * inner)
        reached += share
        bar.append("█" * cells, style=style)
        if share >= 0.005:
            legend.append(Text.assemble(("■", style), f" {label} {percent(share)}"))
    return [Text(), bar, Columns(legend, padding=(0, 2))]
