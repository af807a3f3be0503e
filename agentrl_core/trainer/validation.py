"""Greedy and sampled answers to the validation prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from agentrl_core.config import ResolvedConfig
from agentrl_core.data.rows import PromptBatch
from agentrl_core.rollout.manager import AgentLoopManager
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.trainer.metrics import validation_metrics

Row = Mapping[str, Any]


class Validator:
    """Asks the current policy.

    Args:
        config: ``trainer.validation`` says how.
        rows: validation prompts.
    """

    def __init__(self, config: ResolvedConfig, rows: Sequence[Row]) -> None:
        self._settings = config.trainer.validation
        self._rows = rows[: self._settings.max_prompts]

    def run(self, step: int, rollout: AgentLoopManager) -> tuple[dict[str, float], list[TrajectoryResult]]:
        """Metrics under ``validation/`` (see ``validation_metrics``), and all trajectories.

        ``rollout`` has the weights to judge.
        """
        sampling = asdict(self._settings.sampling)
        modes = {
            "greedy": (int(self._settings.greedy), {**sampling, "temperature": 0.0}),
            "sampled": (self._settings.n, sampling),
        }
        results: dict[str, list[TrajectoryResult]] = {}
        for mode, (n, parameters) in modes.items():
            if n and self._rows:
                prompts = PromptBatch.sampled(self._rows, step, f"validation.{mode}", n, parameters)
                results[mode] = rollout.generate_sequences(prompts)
                rollout.score_groups(results[mode])
        metrics = validation_metrics(results, self._settings.correct_above)
        return metrics, [result for group in results.values() for result in group]
