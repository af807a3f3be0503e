"""Trains the calculator example with every estimator, every loss and some corrections; writes a table and curves.

    python benchmarks/algorithms.py --seeds 3 --output docs/results

A method is a kind and a name, such as ``loss-gspo``. Estimators run with the loss ppo, losses and corrections with the
estimator grpo. A run that is complete in ``--work`` is read, not repeated.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from calculator import SAMPLED, prepare, run
from matplotlib.figure import Figure

from agentrl_algorithms import plugin as plugins
from agentrl_core.api import PluginSpec

LEARNED = 0.85
KEYS = {"advantage_estimator": "advantage", "policy_loss": "loss", "rollout_correction": "correction"}
LABELS = {"advantage": "estimator"}
PER_ROW = ["algorithm.aggregation=seq-mean-token-mean"]
TEACHER, STUDENT = "estimator-grpo", "estimator-on_policy_distillation"
SETTINGS = {
    "loss-gspo": PER_ROW,
    "loss-gmpo": PER_ROW,
    "loss-sapo": PER_ROW,
    "loss-dro": PER_ROW,
    "loss-sft": ["algorithm.loss.config.tokens=positive"],
}
"""What the page on algorithms says about a method; ``sft`` on all tokens does not see the reward."""
ONE_RUN = [
    "trainer.validation.interval=0",
    "trainer.validation.before=false",
    "trainer.validation.greedy=false",
    "trainer.checkpoint.interval=0",
    "trainer.checkpoint.best_metric=null",
]


def methods() -> Iterator[tuple[str, list[str]]]:
    """Each method with its overrides."""
    for spec in vars(plugins).values():
        if isinstance(spec, PluginSpec):
            if spec is plugins.PPO:  # the run of the estimator grpo
                continue
            key = KEYS[spec.kind]
            method = f"{LABELS.get(key, key)}-{spec.name}"
            yield method, [f"algorithm.{key}.name={spec.name}", *SETTINGS.get(method, [])]


METHODS = dict(methods())


@dataclass(frozen=True)
class Outcome:
    """One run: where its metrics are, its sampled accuracy at the end, and how long it took."""

    metrics_file: Path
    accuracy: float
    seconds: float


def train(method: str, seed: int, steps: int, directory: Path) -> Outcome:
    """One run, unless there is one of as many steps."""
    name = f"{method}-{seed}"
    folder = directory / "runs" / name
    metrics_file, seconds_file = folder / "metrics.jsonl", folder / "seconds.json"
    if not (seconds_file.exists() and json.loads(seconds_file.read_text())["steps"] == steps):
        agentrl = Path(sys.executable).parent / "agentrl"
        overrides = [*METHODS[method], f"trainer.name={name}", f"trainer.seed={seed}", f"trainer.steps={steps}"]
        if method == STUDENT:
            teacher = directory / "runs" / f"{TEACHER}-{seed}" / "checkpoints" / "latest"
            run([agentrl, "export", teacher, directory / "teacher"], directory)
            overrides.append(f"teacher.path={directory / 'teacher'}")
        config = "ppo.yaml" if method.endswith("gae") else "config.yaml"
        seconds = run([agentrl, "train", config, *ONE_RUN, *overrides], directory)
        seconds_file.write_text(json.dumps({"steps": steps, "seconds": seconds}))
    rows = [json.loads(line) for line in metrics_file.read_text().splitlines()]
    accuracy = next(row[SAMPLED] for row in reversed(rows) if SAMPLED in row)
    return Outcome(metrics_file, accuracy, json.loads(seconds_file.read_text())["seconds"])


def draw(path: Path, files: dict[str, Path]) -> None:
    """The training reward of each run over its steps."""
    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for number, (method, file) in enumerate(files.items()):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        points = [(row["step"], row["reward/mean"]) for row in rows if "reward/mean" in row]
        style = ("-", "--", ":")[number // 10 % 3]
        axes.plot(*zip(*points, strict=True), style, color=f"C{number % 10}", label=method)
    axes.set(xlabel="step", ylabel="training reward, seed 0")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path)


def write_page(path: Path, outcomes: dict[str, list[Outcome]], seeds: int, steps: int) -> None:
    """The table, with the command that makes it."""
    left_out = [method for method in METHODS if method not in outcomes]
    chosen = f" --methods {' '.join(outcomes)}" if left_out else ""
    lines = [
        "# Algorithms on the calculator example",
        "",
        f"`python benchmarks/algorithms.py --seeds {seeds} --steps {steps}{chosen}`, {date.today()}.",
        "",
        "Accuracy is that of sampled answers to 200 unseen problems after the last step, about 0.2 before training.",
        f"A method has learned if every seed reaches {LEARNED}. The task is easy: the table shows which methods learn, "
        "not which is best.",
        "",
        "![Training reward](algorithms.png)",
        "",
        f"| method | {' | '.join(f'seed {seed}' for seed in range(seeds))} | learned | seconds per run |",
        "|---" * (seeds + 3) + "|",
    ]
    for method, runs in outcomes.items():
        accuracies = " | ".join(f"{each.accuracy:.3f}" for each in runs)
        verdict = "yes" if all(each.accuracy >= LEARNED for each in runs) else "no"
        seconds = sum(each.seconds for each in runs) / len(runs)
        lines.append(f"| `{method}` | {accuracies} | {verdict} | {seconds:.0f} |")
    lines += [
        "",
        "- `loss-sft` trains on tokens with a positive advantage only. On all tokens it does not see the reward.",
        "- Engine and trainer have the same probabilities here, so corrections should change nothing.",
        "- Seconds include start-up and depend on what else the machine did. Do not compare methods by them.",
    ]
    if left_out:
        lines += ["", f"Not measured: {', '.join(f'`{method}`' for method in left_out)}."]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-algorithms"), help="for models and runs")
    parser.add_argument("--output", type=Path, help="directory for the page and the picture")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folders = [options.work.resolve() / f"seed-{seed}" for seed in range(options.seeds)]
    for seed, folder in enumerate(folders):
        prepare(seed, folder)
    # The student needs the teacher's run.
    rounds = [
        [each for each in options.methods if each != STUDENT],
        [each for each in options.methods if each == STUDENT],
    ]
    outcomes: dict[str, list[Outcome]] = {}
    with ThreadPoolExecutor(options.processes) as pool:
        for chosen in rounds:
            jobs = {
                method: [pool.submit(train, method, seed, options.steps, folder) for seed, folder in enumerate(folders)]
                for method in chosen
            }
            outcomes |= {method: [job.result() for job in runs] for method, runs in jobs.items()}
    output = options.output or options.work
    files = {method: runs[0].metrics_file for method, runs in outcomes.items()}
    draw(output / "algorithms.png", files)
    write_page(output / "algorithms.md", outcomes, options.seeds, options.steps)


if __name__ == "__main__":
    main()
