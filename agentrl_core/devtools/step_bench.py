"""Where a step's time goes, and how two configurations compare: what `agentrl bench` measures."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

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
        self, step: int, results: list[TrajectoryResult], batch: DataProto, metrics: dict[str, float]
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


def compare(
    config: Path, other: Path, overrides: Sequence[str], steps: int, pairs: int
) -> tuple[StepFigures, StepFigures, list[float]]:
    """The figures of both, and of each pair of runs the seconds of the second divided by those of the first.

    The runs alternate, and so does which of a pair is first: what else the machine does hits both.
    """
    rows: dict[Path, list[dict[str, float]]] = {config: [], other: []}
    ratios: list[float] = []
    for pair in range(pairs):
        found = {file: measure(file, overrides, steps) for file in ((config, other), (other, config))[pair % 2]}
        for file, measured in found.items():
            rows[file] += measured
        ratios.append(figures(found[other]).seconds / figures(found[config]).seconds)
    return figures(rows[config]), figures(rows[other]), ratios
