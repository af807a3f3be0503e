"""Trains the calculator example from nothing for several seeds, and draws and tables what came of it.

    python benchmarks/calculator.py --seeds 0 1 2 --output docs/results

Every seed makes its own model and data and is the seed of its runs. ``--variants`` chooses among grpo, ray and ppo.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from _report import Figure, report

from agentrl_trackers_basic.curve import draw_curves

EXAMPLE = Path(__file__).parents[1] / "examples" / "calculator"
VARIANTS = {
    "grpo": ("config.yaml", []),
    "ray": ("config.yaml", ["cluster.runtime=ray"]),
    "ppo": ("ppo.yaml", []),
}
SAMPLED = "validation/calculator/accuracy_sampled"
GREEDY = "validation/calculator/accuracy_greedy"


@dataclass(frozen=True)
class Outcome:
    """One run: where its metrics are, what it reached, what it took."""

    metrics_file: Path
    before: float
    after: float
    greedy: float
    seconds: float


def run(arguments: Sequence[str | Path], directory: Path) -> float:
    """Seconds that a command took; its output goes to ``log.txt``."""
    start = time.perf_counter()
    with (directory / "log.txt").open("a") as log:
        subprocess.run([str(item) for item in arguments], cwd=directory, stdout=log, stderr=log, check=True)
    return time.perf_counter() - start


def prepare(seed: int, directory: Path) -> float:
    """Make model and data of a seed, with copies of the configurations beside them."""
    directory.mkdir(parents=True, exist_ok=True)
    for config in EXAMPLE.glob("*.yaml"):
        (directory / config.name).write_bytes(config.read_bytes())
    return run([sys.executable, EXAMPLE / "prepare.py", "--output", directory, "--seed", str(seed)], directory)


def train(variant: str, seed: int, directory: Path, overrides: Sequence[str]) -> Outcome:
    """One run of one variant."""
    config, settings = VARIANTS[variant]
    name = f"{variant}-{seed}"
    agentrl = Path(sys.executable).parent / "agentrl"
    named = [f"trainer.name={name}", f"trainer.seed={seed}"]
    seconds = run([agentrl, "train", config, *settings, *named, *overrides], directory)
    metrics_file = directory / "runs" / name / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics_file.read_text().splitlines()]
    validated = [row for row in rows if SAMPLED in row]
    first, last = validated[0], validated[-1]
    return Outcome(metrics_file, first[SAMPLED], last[SAMPLED], last[GREEDY], seconds)


def measured(options: argparse.Namespace) -> Iterator[Figure]:
    """The figures of each run as it ends, and a picture of each variant's runs."""
    work = options.work.resolve()
    prepared = {seed: prepare(seed, work / f"seed-{seed}") for seed in options.seeds}
    for variant in options.variants:
        files: dict[str, Path] = {}
        for seed in options.seeds:
            outcome = train(variant, seed, work / f"seed-{seed}", options.overrides)
            files[f"seed {seed}"] = outcome.metrics_file
            case, goal = f"{variant}, seed {seed}", 0.80 if variant == "ppo" else 0.90
            yield Figure(case, "sampled accuracy before", outcome.before, "", goal=0.30)
            yield Figure(case, "sampled accuracy after", outcome.after, "", goal=goal, at_least=True)
            yield Figure(case, "greedy accuracy after", outcome.greedy, "")
            yield Figure(case, "making model and data", prepared[seed], "s")
            yield Figure(case, "training, start-up included", outcome.seconds, "s")
        if options.output is not None:
            picture = "calculator.png" if variant == "grpo" else f"calculator-{variant}.png"
            draw_curves(files, options.output / picture, f"calculator, {variant}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["grpo", "ray", "ppo"])
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-calculator"), help="for models and runs")
    parser.add_argument("--output", type=Path, help="directory for the pictures")
    parser.add_argument("--json", type=Path, help="file for the figures, written as they come")
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    report("The calculator example, from nothing", measured(options), options.json)


if __name__ == "__main__":
    main()
