"""Trains the examples that have a known optimum, with several seeds, and writes what they reach.

    python benchmarks/proof.py --seeds 3 --output docs/results/proof.md [kuhn_poker …]

A run that is complete in ``--work`` is read, not repeated: start the command again after an interruption. Examples
without a complete run are left out of the page.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np

from agentrl_core.config import load_config
from agentrl_core.runs.run_dir import RunDir

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Proof:
    """What an example is to show.

    Args:
        measures: for the table.
        measure: of a run's folder: the value before training and at its end.
        goal: for the value at the end.
        lower: whether lower is better.
        why: of the goal.
    """

    measures: str
    measure: Callable[[Path], tuple[float, float]]
    goal: float
    why: str
    lower: bool = False

    def met(self, values: Sequence[float]) -> bool:
        """Whether every seed reaches the goal."""
        return all(value <= self.goal if self.lower else value >= self.goal for value in values)


def found(run: Path) -> tuple[float, float]:
    """Share of games in which the number was found: in the first three steps, and in the last five."""
    values = [line["reward/environment/found"] for line in RunDir(run).read_metrics() if "reward/mean" in line]
    return float(np.mean(values[:3])), float(np.mean(values[-5:]))


def accuracy(run: Path) -> tuple[float, float]:
    """Greedy accuracy on unseen problems, before the first step and after the last one."""
    name = "validation/calculator/accuracy_greedy"
    values = [line[name] for line in RunDir(run).read_metrics() if name in line]
    return values[0], values[-1]


def exploitability(run: Path) -> tuple[float, float]:
    """Of the model before training, and of the average policy of the last five checkpoints."""
    sys.path.insert(0, str(ROOT / "examples/kuhn_poker"))
    import exploitability as kuhn  # type: ignore[import-not-found]

    folders = sorted(run.glob("checkpoints/step-*/actor"))
    policies = [kuhn.policy_of(folder)[0] for folder in folders[-kuhn.LAST :]]
    before, _ = kuhn.policy_of(ROOT / "examples/kuhn_poker/model")
    return kuhn.exploitability(before), kuhn.exploitability(kuhn.average(policies))


PROOFS = {
    "calculator": Proof("greedy accuracy on unseen problems", accuracy, 0.85, "most problems need the calculator"),
    "guess_number": Proof(
        "games in which the number is found", found, 0.9 * 63 / 64, "90% of what binary search finds"
    ),
    "kuhn_poker": Proof(
        "exploitability of the average policy of the last five checkpoints, antes per hand", exploitability, 0.1,
        "uniform play has 0.458, an equilibrium 0", lower=True,
    ),
}  # fmt: skip


def is_complete(folder: Path, config: Path) -> bool:
    """Whether a run has made all its steps."""
    steps = load_config(config, check_files=False).trainer.steps
    return any(line["step"] == steps for line in RunDir(folder).read_metrics()) if folder.is_dir() else False


def train(name: str, seed: int, work: Path) -> Path:
    """The folder of a complete run; makes the example's model and the run where they are absent."""
    example, folder = ROOT / "examples" / name, work / f"{name}-{seed}"
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    if not (example / "model").is_dir():
        subprocess.run([sys.executable, str(example / "prepare.py")], check=True, env=environment)
    if not is_complete(folder, example / "config.yaml"):
        agentrl = str(Path(sys.executable).with_name("agentrl"))
        names = [f"trainer.seed={seed}", f"trainer.name={folder.name}", f"trainer.output_dir={work}"]
        subprocess.run([agentrl, "train", str(example / "config.yaml"), *names], check=True, env=environment)
    return folder


def page(measured: dict[str, dict[int, tuple[float, float]]], command: str) -> str:
    """The page: for each example the values of its seeds, ``{seed: (before, at the end)}``."""
    lines = [
        "# Proof of learning", "",
        f"`{command}`, {date.today()}.", "",
        "What the examples reach, from the models that their `prepare.py` makes. Each seed is a run with another "
        "`trainer.seed` from the same model.", "",
        "| example | measured | before | at the end, by seed | goal | met by all |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, seeds in measured.items():
        proof, ends = PROOFS[name], [end for _, end in seeds.values()]
        before = np.mean([start for start, _ in seeds.values()])
        values = ", ".join(f"{seed}: {end:.3f}" for seed, (_, end) in seeds.items())
        sign = "at most" if proof.lower else "at least"
        lines.append(
            f"| [{name}](../../examples/{name}/README.md) | {proof.measures} | {before:.3f} | {values} | "
            f"{sign} {proof.goal:.2f}: {proof.why} | {'yes' if proof.met(ends) else 'no'} |"
        )
    if absent := [name for name in PROOFS if name not in measured]:
        lines += ["", f"Not run here: {', '.join(absent)}."]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", nargs="*", default=[], help="which ones; all if none is named")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each example, with the seeds from 0 (3)")
    parser.add_argument("--work", type=Path, default=Path("runs/proof"), help="where the runs are (runs/proof)")
    parser.add_argument("--output", type=Path, default=Path("docs/results/proof.md"), help="the page")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.examples) - PROOFS.keys()):
        parser.error(f"there is no {', '.join(unknown)}; choose from {', '.join(PROOFS)}")
    chosen = arguments.examples or list(PROOFS)
    measured: dict[str, dict[int, tuple[float, float]]] = {}
    for name in (each for each in PROOFS if each in chosen):
        for seed in range(arguments.seeds):
            folder = train(name, seed, arguments.work)
            measured.setdefault(name, {})[seed] = PROOFS[name].measure(folder)
        named = " ".join([*arguments.examples, f"--seeds {arguments.seeds}"])
        arguments.output.write_text(page(measured, f"python benchmarks/proof.py {named}"), encoding="utf-8")


if __name__ == "__main__":
    main()
