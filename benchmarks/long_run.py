"""Train for thousands of steps with a scripted engine, and watch memory, descriptors, threads and disk from outside.

    python benchmarks/long_run.py --steps 2000 --write
    python benchmarks/long_run.py --steps 300 --runtime ray
    python benchmarks/long_run.py --steps 300 --runtime overlap

``overlap`` is Ray, sampling while it trains. The model is tiny; the tool and the reward run in processes of their own;
the trackers are those that a run has by default. The first fifth of the steps is the warm-up. ``--write`` puts the
figures into docs/reliability.md.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from _chaos_run import ChaosRun, process_name, shared_memory
from chaos import CHANGES, put_between

from agentrl_core.hosting.processes import family

PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"
PAGE_SIZE = 4096
SLACK = 3
"""Descriptors or threads that one sample may have by chance: a file that is being written, a thread of torch."""


@dataclass(frozen=True)
class Sample:
    """One process at the end of a step. ``memory`` is its resident set in MB."""

    step: int
    memory: float
    descriptors: int
    threads: int
    shared: int


def sample(pid: int, step: int) -> Sample | None:
    with suppress(OSError):
        process = Path(f"/proc/{pid}")
        resident = int((process / "statm").read_text().split()[1]) * PAGE_SIZE / 2**20
        descriptors, threads = len(list((process / "fd").iterdir())), len(list((process / "task").iterdir()))
        return Sample(step, resident, descriptors, threads, len(shared_memory({pid})))
    return None


def watch(run: ChaosRun, steps: int) -> dict[tuple[str, int], list[Sample]]:
    """A sample of each process every hundredth of the run."""
    samples: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    every = max(steps // 100, 1)
    for step in range(every, steps, every):
        if not run.until(lambda step=step: run.step() >= step, f"step {step}"):
            break
        for pid in family(run.pid):
            if (taken := sample(pid, run.step())) is not None:
                samples[process_name(run, pid), pid].append(taken)
    return samples


def slope(samples: Sequence[Sample]) -> float:
    """Growth of the memory in kB a step, as a line through all samples."""
    steps, memory = [each.step for each in samples], [each.memory for each in samples]
    return float(np.polyfit(steps, memory, 1)[0]) * 1024


def grown(samples: dict[tuple[str, int], list[Sample]], warm: int) -> list[str]:
    """What is not flat after the warm-up: descriptors, threads or shared memory of which the second half has more."""
    problems = []
    for (name, _), each in samples.items():
        after = [sample for sample in each if sample.step > warm]
        half = len(after) // 2
        for what in ("descriptors", "threads", "shared") if half else ():
            before, late = (max(getattr(sample, what) for sample in part) for part in (after[:half], after[half:]))
            if late > before + SLACK:
                problems.append(f"{name}: {what} grew from {before} to {late}")
    return problems


def table(samples: dict[tuple[str, int], list[Sample]], warm: int) -> list[str]:
    lines = [
        "| process | memory after the warm-up | at the end | growth | descriptors | threads | shared memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for (name, _), each in samples.items():
        after = [sample for sample in each if sample.step > warm]
        if len(after) > 2:
            first, last = after[0], after[-1]
            pairs = [f"{getattr(first, what)} → {getattr(last, what)}" for what in ("descriptors", "threads", "shared")]
            memory = f"{first.memory:.0f} MB | {last.memory:.0f} MB | {slope(after):.2f} kB a step"
            lines.append(f"| {name} | {memory} | {' | '.join(pairs)} |")
    return lines


def disk(run: ChaosRun, steps: int) -> list[str]:
    """Sizes of the parts of the run directory."""
    sizes = {
        "rollouts, plain": run.run_dir.rollouts_dir.glob("*.jsonl"),
        "rollouts, compressed": run.run_dir.rollouts_dir.glob("*.jsonl.gz"),
        "metrics.jsonl": [run.run_dir.metrics_file],
        "log.txt": [run.run_dir.log_file],
        "tensorboard": (run.run_dir.path / "tensorboard").rglob("*.*"),
        "checkpoints": (file for file in run.run_dir.checkpoints_dir.rglob("*") if file.is_file()),
    }
    lines = ["| on disk | files | size | a step |", "|---|---|---|---|"]
    for name, files in sizes.items():
        found = [file.stat().st_size for file in files if not file.parent.is_symlink()]
        per_step = "constant" if name in ("rollouts, plain", "checkpoints") else f"{sum(found) / 1024 / steps:.2f} kB"
        lines.append(f"| {name} | {len(found)} | {sum(found) / 2**20:.2f} MB | {per_step} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--runtime", choices=tuple(CHANGES), default="local")
    parser.add_argument("--write", action="store_true", help="put the figures into docs/reliability.md")
    options = parser.parse_args(arguments)
    steps, warm = options.steps, options.steps // 5
    folder = Path(tempfile.mkdtemp(prefix="long"))
    changes = {
        "rollout.engine": {"name": "./parts.py:Letters"},
        **CHANGES[options.runtime],
        "trainer.trackers": ["console", "jsonl", "tensorboard", "curve"],
        "trainer.checkpoint": {"interval": max(steps // 20, 1), "keep": 2},
        "trainer.validation": {"interval": max(steps // 20, 1), "max_prompts": 2},
    }
    run = ChaosRun(folder / "r", steps, changes)
    run.start()
    begin = time.monotonic()
    samples = watch(run, steps)
    code = run.wait()
    problems = grown(samples, warm) + ([f"exit {code}: {run.output()[-2000:]}"] if code else [])
    heading = f"{steps} steps on the {options.runtime} runtime, {(time.monotonic() - begin) / 60:.0f} minutes:"
    lines = [heading, "", *table(samples, warm), "", *disk(run, steps)]
    sys.stdout.write("\n".join([*lines, *problems]) + "\n")
    if options.write and not problems:
        put_between(PAGE, f"long run {options.runtime}", lines)
    shutil.rmtree(folder)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
