"""Where a step's time goes, and how two configurations or commits compare: what `agentrl bench` measures."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import agentrl_core
from agentrl_core.api import AgentRLError, ConfigError
from agentrl_core.config import ResolvedConfig, load_config
from agentrl_core.protocol import DataProto
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.trainer import Trainer

WARM_UP = 1
"""Steps before the measurement: the first ones compile, allocate and start tools."""
_QUIET = (
    "trainer.name=bench", "trainer.resume=never", "trainer.trackers=[]", "trainer.validation.before=false",
    "trainer.checkpoint.best_metric=null", "hooks=[]",
)  # fmt: skip


class _Measured(Trainer):
    """A trainer that keeps the metrics of its steps, and leaves out records, validation and checkpoints."""

    def __init__(self, config: ResolvedConfig) -> None:
        super().__init__(config)
        self.rows: list[dict[str, float]] = []

    def finish_step(
        self, step: int, results: list[TrajectoryResult], batches: dict[str, DataProto], metrics: dict[str, float]
    ) -> None:
        self.step = step
        self.rows.append(self._measured(metrics))

    def _save_last(self) -> None:
        pass


@dataclass(frozen=True)
class StepFigures:
    """Medians over the measured steps.

    Args:
        seconds: of a step.
        phases: seconds by phase, most first; ``other`` is what no phase has.
        tokens_per_second: sampled tokens per second of a step.
    """

    seconds: float
    phases: Mapping[str, float]
    tokens_per_second: float


def figures(rows: Sequence[Mapping[str, float]]) -> StepFigures:
    """The medians of the metrics of some steps."""
    names = {name for row in rows for name in row if name.startswith("timing/") and name.count("/") == 1}
    phases = {
        name.removeprefix("timing/"): median(row.get(name, 0.0) for row in rows) for name in names - {"timing/step"}
    }
    seconds = median(row["timing/step"] for row in rows)
    phases = dict(sorted(phases.items(), key=lambda item: -item[1]))
    phases["other"] = max(seconds - sum(phases.values()), 0.0)
    return StepFigures(seconds, phases, median(row["perf/tokens_per_second"] for row in rows))


def measure(config: Path, overrides: Sequence[str], steps: int) -> list[dict[str, float]]:
    """Train for some steps in a temporary directory, and return their metrics without those of the first one."""
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
        quiet = [*_QUIET, f"trainer.steps={steps + WARM_UP}", f"trainer.output_dir={folder}"]
        trainer = _Measured(load_config(config, [*overrides, *quiet]))
        trainer.fit()
    return trainer.rows[WARM_UP:]


@contextmanager
def checkout(reference: str) -> Iterator[Path]:
    """A temporary worktree of a commit of the repository that agentrl runs from.

    Raises:
        ConfigError: agentrl does not run from a git repository, or it has no such commit.
    """
    repository = Path(agentrl_core.__file__).parents[1]
    found = _git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{reference}^{{commit}}")
    if found.returncode:
        raise ConfigError(f"--against: {reference!r} is neither a file nor a commit of the repository {repository}")
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-commit-") as folder:
        added = _git(repository, "worktree", "add", "--detach", folder, found.stdout.strip())
        if added.returncode:
            raise ConfigError(f"--against: git cannot check out {reference!r}: {added.stderr.strip()}")
        try:
            yield Path(folder)
        finally:
            _git(repository, "worktree", "remove", "--force", folder)


def _git(repository: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(["git", "-C", str(repository), *arguments], capture_output=True, text=True)
    except OSError as error:
        raise ConfigError(f"--against: to compare with a commit, install git ({error})") from error


def environment_of(folder: Path) -> dict[str, str]:
    """Environment variables with which Python imports agentrl and its plugins from a checkout."""
    sources = [folder, *sorted(folder.glob("plugins/*/*/src"))]
    # Without PYTHONSAFEPATH the working directory comes first, which may be another checkout.
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources)), "PYTHONSAFEPATH": "1"}


def measure_at(folder: Path, config: Path, overrides: Sequence[str], steps: int) -> list[dict[str, float]]:
    """As :func:`measure`, but one row of medians, by ``agentrl bench`` of a checkout in a process.

    Raises:
        AgentRLError: it failed; its output is on standard error.
    """
    command = [sys.executable, "-m", "agentrl_core.cli.main", "bench", str(config), *overrides]
    command += ["--steps", str(steps), "--json"]
    done = subprocess.run(command, env=environment_of(folder), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise AgentRLError(f"agentrl bench of the code in {folder} failed with exit code {done.returncode}")
    (found,) = json.loads(done.stdout)["configs"].values()
    phases = {f"timing/{name}": seconds for name, seconds in found["phases"].items() if name != "other"}
    return [{**phases, "timing/step": found["seconds"], "perf/tokens_per_second": found["tokens_per_second"]}]


def compare(
    one: Callable[[], list[dict[str, float]]], other: Callable[[], list[dict[str, float]]], pairs: int
) -> tuple[StepFigures, StepFigures, list[float]]:
    """The figures of both, and of each pair of runs the seconds of the second divided by those of the first.

    The runs alternate, and so does which of a pair is first: what else the machine does hits both.
    """
    rows: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
    ratios: list[float] = []
    for pair in range(pairs):
        found = {at: (one, other)[at]() for at in ((0, 1), (1, 0))[pair % 2]}
        for at, measured in found.items():
            rows[at].extend(measured)
        ratios.append(figures(found[1]).seconds / figures(found[0]).seconds)
    return figures(rows[0]), figures(rows[1]), ratios
