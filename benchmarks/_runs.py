"""Many short runs of the calculator example, each written to a file as it ends: what is there is not repeated."""

import argparse
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from calculator import SAMPLED, prepare

PASS_AT_8 = "validation/calculator/pass_at_8"
SETTINGS = (
    "trainer.trackers=[jsonl]",
    "rollout.records=none",
    "trainer.checkpoint.interval=0",
    "trainer.checkpoint.best_metric=null",
    "trainer.validation.interval=0",
    "trainer.validation.before=false",
    "trainer.validation.greedy=false",
    "trainer.validation.n=8",
    "trainer.validation.max_prompts=50",
)
"""Of every run. Eight answers to each of 50 unseen problems after the last step."""


@dataclass(frozen=True)
class Job:
    """One run.

    Args:
        name: of what is compared.
        overrides: ``key=value``.
        config: of the example.
        delay: updates by which the weights that sample are behind those that are trained.
        teacher: name of a job with the same seed whose last policy is ``teacher.path``.
    """

    name: str
    seed: int
    overrides: tuple[str, ...]
    config: str = "config.yaml"
    delay: int = 0
    teacher: str | None = None

    @property
    def run_name(self) -> str:
        return f"{self.name}-{self.seed}"


@dataclass(frozen=True)
class Outcome:
    """A finished run: the mean training reward of each step, the last step's metrics, and the error that ended it."""

    job: dict[str, Any]
    rewards: list[float]
    accuracy: float
    pass_at_8: float
    seconds: float
    metrics: dict[str, float]
    failure: str = ""


def command_line(name: str, description: str | None, *, seeds: int, steps: int) -> argparse.ArgumentParser:
    """The options that all benchmarks of many runs have, with these defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=seeds, help="number of seeds")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--processes", type=int, default=1, help="runs at a time; 0: only write what is done")
    parser.add_argument("--work", type=Path, default=Path(f"runs/benchmark-{name}"), help="for models and runs")
    parser.add_argument("--output", type=Path, help="directory for the page and the picture")
    return parser


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, with absolute directories that exist; runs that are started then compute in one thread."""
    options = parser.parse_args(arguments)
    options.work = options.work.resolve()
    options.output = options.output or options.work
    options.output.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return options


def train(job: Job, directory: Path, trainer_class: Callable[[Any], Any] | None = None) -> Outcome:
    """One run, in this process. ``directory`` holds the model and the data of its seed."""
    from agentrl_core.api import AgentRLError, ConfigError
    from agentrl_core.config import load_config
    from agentrl_core.trainer import Trainer

    os.chdir(directory)
    overrides = [*SETTINGS, *job.overrides, f"trainer.name={job.run_name}", f"trainer.seed={job.seed}"]
    if job.teacher is not None:
        overrides.append(f"teacher.path={_teacher(directory / 'runs' / f'{job.teacher}-{job.seed}')}")
    start, failure = time.perf_counter(), ""
    try:
        (trainer_class or Trainer)(load_config(Path(job.config), overrides)).fit()
    except ConfigError:
        raise
    except AgentRLError as error:  # such as a loss that is not finite: a row of the table
        failure = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    seconds = time.perf_counter() - start
    file = directory / "runs" / job.run_name / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    last = rows[-1] if rows else {}
    return Outcome(asdict(job), rewards, last.get(SAMPLED, 0.0), last.get(PASS_AT_8, 0.0), seconds, last, failure)


def _teacher(run: Path) -> Path:
    """The last policy of a run, as a directory that transformers loads."""
    teacher = run / "teacher"
    if not teacher.exists():
        agentrl = Path(sys.executable).parent / "agentrl"
        subprocess.run([agentrl, "export", run / "checkpoints" / "latest", teacher], check=True)
    return teacher


def run_all(
    jobs: Sequence[Job], directory: Path, processes: int, trainer_of: Callable[[Job], Any] | None = None
) -> dict[Job, Outcome]:
    """Run what ``directory/outcomes.jsonl`` does not have yet, or nothing with ``processes=0``.

    Returns the outcomes that there are then.
    """
    file = directory / "outcomes.jsonl"
    known = {_key(outcome.job): outcome for outcome in read(file)}
    missing = [job for job in jobs if _key(asdict(job)) not in known] if processes else []
    for seed in sorted({job.seed for job in missing}):
        if not (directory / f"seed-{seed}" / "data" / "prepared.json").exists():
            prepare(seed, directory / f"seed-{seed}")
    # Students after their teachers.
    for round_of in (
        [job for job in missing if job.teacher is None],
        [job for job in missing if job.teacher is not None],
    ):
        for outcome in _outcomes(round_of, directory, processes, trainer_of):
            known[_key(outcome.job)] = outcome
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(asdict(outcome)) + "\n")
            name, seed = outcome.job["name"], outcome.job["seed"]
            sys.stderr.write(f"{name} seed {seed}: {outcome.accuracy:.3f}, {outcome.seconds:.0f} s {outcome.failure}\n")
    return {job: known[key] for job in jobs if (key := _key(asdict(job))) in known}


def _outcomes(
    jobs: Sequence[Job], directory: Path, processes: int, trainer_of: Callable[[Job], Any] | None
) -> Iterator[Outcome]:
    """Outcomes as they come. Each process is a new one, so that none inherits torch's threads."""
    if not jobs:
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), initializer=_quiet) as pool:
        futures = [
            pool.submit(train, job, directory / f"seed-{job.seed}", trainer_of(job) if trainer_of else None)
            for job in jobs
        ]
        for future in as_completed(futures):
            yield future.result()


def _quiet() -> None:
    logging.basicConfig(level=logging.ERROR)


def read(file: Path) -> list[Outcome]:
    """The outcomes of a file; none if it is not there."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [Outcome(**json.loads(line)) for line in lines]


def _key(job: dict[str, Any]) -> str:
    return json.dumps(job, sort_keys=True)
