"""What a person sees of a run: a panel that is redrawn in a terminal, one line per step everywhere else.

Both go through rich's one console, ``rich.get_console()``. Log lines that use the same console (``RichHandler``) appear
above the panel instead of tearing it. A notebook gets the lines on standard output.
"""

import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta

import rich
from rich.console import Console
from rich.live import Live

from agentrl_core.api import Tracker, TrackerContext
from agentrl_trackers_basic.config import ConsoleConfig
from agentrl_trackers_basic.formatting import compact, duration, figure, percent
from agentrl_trackers_basic.live_view import live_view
from agentrl_trackers_basic.metrics import idle_shares, mean_accuracies, metrics_file, read_metrics, time_shares
from agentrl_trackers_basic.progress import FAILED, TOKENS, TOOL_FAILURES, Progress

_SMALLEST_SHARE = 0.02
_QUIET_SECONDS = 30.0
"""After this time without a line, one says how far the step is."""
_REDRAW_SECONDS = 0.5


class ConsoleTracker(Tracker):
    """Shows every step; a resumed run shows the curves from its first step on.

    Args:
        config: whether to redraw in place.
        context: of the run.
        console: where to write; None: ``rich.get_console()``.
        clock: seconds that only grow.
    """

    config: ConsoleConfig

    def __init__(
        self,
        config: ConsoleConfig,
        context: TrackerContext,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(config, context)
        self._console = console or rich.get_console()
        self._clock = clock
        overlaps = bool(context.config.get("rollout", {}).get("max_staleness"))
        self._progress = Progress(context.run_name, context.total_steps, clock(), overlaps)
        if context.first_step > 1:
            for row in read_metrics(metrics_file(context.run_dir)):
                self._progress.remember(row["step"], row)
        in_terminal = self._console.is_interactive and self._console.file.isatty()
        live = in_terminal if config.live is None else config.live
        # Redrawn when there is something new and not by a timer, which would write over a debugger's prompt.
        self._live = Live(console=self._console, auto_refresh=False) if live else None
        self._shown = self._clock()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        values = {name: float(value) for name, value in metrics.items()}
        self._progress.add(step, values, self._clock())
        self._shown = self._clock()
        if self._live is None:
            self._write(plain_line(values, step, self._progress.total_steps, self._progress.remaining))
            return
        self._redraw()

    def progress(self, phase: str, done: int = 0, total: int = 0) -> None:
        progress = self._progress
        progress.report(phase, done, total)
        quiet = self._clock() - self._shown
        if quiet < (_QUIET_SECONDS if self._live is None else _REDRAW_SECONDS):
            return
        self._shown = self._clock()
        if self._live is not None:
            self._redraw()
        elif total or progress.overlaps:
            self._write(
                f"step {min(progress.step + 1, progress.total_steps)}/{progress.total_steps}  {progress.going_on}"
            )

    def finish(self, status: str) -> None:
        self._progress.activity = ""
        if self._live is not None and self._live.is_started:
            self._redraw(status)
            self._live.stop()
        if self._progress.latest:
            for line in summary(self._progress, status):
                self._write(line)

    def _redraw(self, status: str = "") -> None:
        assert self._live is not None, "only a live view is redrawn"
        if not self._live.is_started:
            self._live.start()
        remaining = self._progress.remaining
        done_at = "" if remaining is None else f"{datetime.now() + timedelta(seconds=remaining):%H:%M}"
        self._live.update(live_view(self._progress, self._console.width, done_at, status), refresh=True)

    def _write(self, line: str) -> None:
        if self._console.is_jupyter:
            # rich displays a block of HTML for each call; a notebook joins what goes to standard output.
            sys.stdout.write(f"{line}\n")
            return
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def summary(progress: Progress, status: str) -> list[str]:
    """How the run ended: time and tokens; first, best and last values; what failed."""
    tokens = progress.totals[TOKENS]
    lines = [
        f"run {progress.run_name} {status} at step {progress.step} after {duration(progress.elapsed)}"
        + (f", {compact(tokens)} tokens sampled" if tokens else "")
    ]
    points = {"reward": progress.rewards}
    points |= {f"{each.source} acc ({each.mode})": progress.accuracies[each] for each in sorted(progress.accuracies)}
    for name, values in points.items():
        if values:
            step, best = max(values, key=lambda point: point[1])
            # One value is no progress.
            shown = " -> ".join(f"{value:.2f}" for _, value in [*values[:-1][:1], values[-1]])
            lines.append(f"  {name} {shown}, best {best:.2f} at step {step}")
    steps = max(len(progress.rewards), 1)
    failures = []
    if left_out := progress.totals[FAILED] / steps:
        failures.append(f"{left_out:.1%} of trajectories left out")
    if tool_failures := progress.totals[TOOL_FAILURES] / steps:
        failures.append(f"{tool_failures:.2g} failed tool calls per trajectory")
    if failures:
        lines.append(f"  {', '.join(failures)}: see log.txt")
    return lines


def plain_line(metrics: Mapping[str, float], step: int, total_steps: int, remaining: float | None) -> str:
    """One step as one line of ASCII: ``step 3/20  reward 0.41  acc 0.22 (greedy)  len 34  tools 61%  …``.

    What was not measured is left out. ``remaining`` is in seconds.
    """
    parts = [f"step {step}/{total_steps}"]
    if "reward/mean" in metrics:
        parts.append(f"reward {figure(metrics['reward/mean'])}")
    parts += [f"acc {value:.2f} ({mode})" for mode, value in mean_accuracies(metrics).items()]
    if "response_length/mean" in metrics:
        parts.append(f"len {metrics['response_length/mean']:.0f}")
    if "rollout/tool_call_share" in metrics:
        parts.append(f"tools {percent(metrics['rollout/tool_call_share'])}")
    if metrics.get("rollout/failed_fraction", 0) > 0:
        parts.append(f"failed {percent(metrics['rollout/failed_fraction'])}")
    if "perf/tokens_per_second" in metrics:
        parts.append(f"{compact(metrics['perf/tokens_per_second'])} tok/s")
    shares = [item for item in time_shares(metrics).items() if item[1] >= _SMALLEST_SHARE]
    if shares:
        parts.append(" ".join(f"{label} {percent(share)}" for label, share in shares))
    if "staleness/mean" in metrics:
        parts.append(f"age {metrics['staleness/mean']:.1f} (max {metrics['staleness/max']:.0f})")
    waited = [f"{who} {percent(share)}" for who, share in idle_shares(metrics).items() if share >= _SMALLEST_SHARE]
    if waited:
        parts.append(f"waited: {' '.join(waited)}")
    if remaining:
        parts.append(f"eta {duration(remaining)}")
    return "  ".join(parts)
