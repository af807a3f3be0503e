"""The policies that a run trains, and what is done for each of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentrl_core.config.schema import ResolvedConfig
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.trainer.algorithm import Algorithm
from agentrl_core.trainer.model_columns import ModelColumns
from agentrl_core.trainer.skipped_updates import SkippedUpdates
from agentrl_core.workers.protocols import Actor


@dataclass
class Policy:
    """A policy that is trained.

    Args:
        name: of it.
        config: that holds for it alone.
        prefix: of its metrics; empty where it is the only one.
        actor: its weights and optimizer.
        algorithm: computes its advantages.
        columns: computes what models add to its batches.
        skipped: stops the run where its updates are skipped.
    """

    name: str
    config: ResolvedConfig
    prefix: str
    actor: Actor
    algorithm: Algorithm
    columns: ModelColumns
    skipped: SkippedUpdates

    @property
    def label(self) -> str:
        """For messages; empty where it is the only one."""
        return f"policy {self.name!r}" if self.prefix else ""

    def own(self, results: Sequence[TrajectoryResult]) -> list[TrajectoryResult]:
        """What its agents did."""
        return [result for result in results if result.policy in ("", self.name)]

    def named(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Its metrics by the names that they have among those of the run."""
        return {self.prefix + name: value for name, value in metrics.items()}
