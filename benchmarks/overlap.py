"""Trains the calculator example with a slow tool, with and without sampling while it trains; writes a table and curves.

    python benchmarks/overlap.py --seeds 3 --output docs/results
    python benchmarks/overlap.py --engine vllm --python .engines/vllm/bin/python --output docs/results

Engine and trainer are processes of their own on Ray. The tool answers after 50 ms (median), one call in twenty after a
second. A run that is complete in ``--work`` is read, not repeated. Wall times mean little on a machine that does other
things too; each seed's runs follow one another.
"""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any

from _runs import Job, command_line, parsed, run_all
from matplotlib.figure import Figure

STALENESS = (0, 1, 4)
GOAL, MEAN_OF = 0.9, 2
"""The accuracy on the prompts of a step, each of which is new, as the mean of so many steps."""
ACCURACY = "train/calculator/accuracy"
SETTINGS = (
    "cluster.runtime=ray",
    "rollout.engine.placement=standalone",
    "algorithm.loss.name=dppo",
    f"tools=[{Path(__file__).with_name('_slow_calculator.py')}:SlowCalculator]",
)
Curve = list[tuple[float, float]]
Metrics = dict[str, Any]


def job(engine: str, python: str | None, staleness: int, seed: int, steps: int) -> Job:
    interpreter = () if python is None else (f"rollout.engine.python={python}",)
    overrides = (*SETTINGS, f"rollout.engine.name={engine}", *interpreter, f"rollout.max_staleness={staleness}")
    return Job(f"{engine}-{staleness}", seed, (*overrides, f"trainer.steps={steps}"))


def curve(run: Path) -> tuple[Curve, list[Metrics]]:
    """Seconds since the first step began, and the accuracy of each step; and all metrics."""
    rows = [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if row["step"]]
    times = [datetime.fromisoformat(row["time"]).timestamp() for row in rows]
    begun = times[0] - rows[0]["timing/step"]
    return [(time - begun, row.get(ACCURACY, 0.0)) for time, row in zip(times, rows, strict=True)], rows


def seconds_to_goal(points: Curve) -> float | None:
    """None: it is not reached."""
    for number in range(MEAN_OF, len(points) + 1):
        last = points[number - MEAN_OF : number]
        if sum(accuracy for _, accuracy in last) / MEAN_OF >= GOAL:
            return last[-1][0]
    return None


def draw(path: Path, curves: Mapping[int, Sequence[Curve]]) -> None:
    """A line for each run."""
    figure = Figure(figsize=(7, 3.6), dpi=110, layout="constrained")
    axes = figure.subplots()
    for number, (staleness, runs) in enumerate(curves.items()):
        for run, points in enumerate(runs):
            label = f"max_staleness={staleness}" if run == 0 else None
            axes.plot(*zip(*points, strict=True), color=f"C{number}", label=label, alpha=0.8)
    axes.set(xlabel="seconds since the first step began", ylabel="accuracy on new prompts", ylim=(0, 1.02))
    axes.axhline(GOAL, color="gray", linewidth=0.7)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path)


def lines(curves: Mapping[int, Sequence[Curve]], metrics: Mapping[int, Sequence[list[Metrics]]]) -> list[str]:
    """The table."""
    titles = (
        "`max_staleness`",
        f"seconds to {GOAL:g}",
        "seconds for all steps",
        "accuracy at the end",
        "age: mean, max",
    )
    found = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for staleness, runs in curves.items():
        goals = [seconds_to_goal(points) for points in runs]
        reached = [each for each in goals if each is not None]
        each = ", ".join("not reached" if goal is None else f"{goal:.0f}" for goal in goals)
        middle = f"**{statistics.median(reached):.0f}** ({each})" if reached else each
        whole = statistics.median(points[-1][0] for points in runs)
        ends = ", ".join(f"{sum(accuracy for _, accuracy in points[-3:]) / 3:.2f}" for points in runs)
        rows = [row for run in metrics[staleness] for row in run]
        mean = statistics.mean(row.get("staleness/mean", 0.0) for row in rows)
        most = max(row.get("staleness/max", 0.0) for row in rows)
        found.append(f"| {staleness} | {middle} | {whole:.0f} | {ends} | {mean:.2f}, {most:.0f} |")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line("overlap", __doc__, seeds=3, steps=20)
    parser.add_argument("--engine", default="hf")
    parser.add_argument("--python", help="interpreter of the engine's environment")
    options = parsed(parser, arguments)
    python = str(Path(options.python).absolute()) if options.python else None
    jobs = {
        (staleness, seed): job(options.engine, python, staleness, seed, options.steps)
        for seed in range(options.seeds)
        for staleness in STALENESS
    }
    done = run_all(list(jobs.values()), options.work, options.processes)
    curves: dict[int, list[Curve]] = {}
    metrics: dict[int, list[list[Metrics]]] = {}
    for (staleness, seed), each in jobs.items():
        if each in done and not done[each].failure:
            points, rows = curve(options.work / f"seed-{seed}" / "runs" / each.run_name)
            curves.setdefault(staleness, []).append(points)
            metrics.setdefault(staleness, []).append(rows)
    picture = options.output / f"overlap-{options.engine}.png"
    draw(picture, curves)
    engine = "" if options.engine == "hf" else f" --engine {options.engine} --python PYTHON"
    page = [
        f"# Sampling while the trainer trains: the calculator with a slow tool, engine `{options.engine}`",
        "",
        f"`python benchmarks/overlap.py --seeds {options.seeds} --steps {options.steps}{engine}`, {date.today()}. Each "
        "number in parentheses is a seed.",
        "",
        *lines(curves, metrics),
        "",
        f"![Accuracy over time, a line for each run]({picture.name})",
    ]
    (options.output / f"overlap-{options.engine}.md").write_text("\n".join(page) + "\n", encoding="utf-8")
    sys.stdout.write("\n".join(page) + "\n")


if __name__ == "__main__":
    main()
