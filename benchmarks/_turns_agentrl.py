"""The hook and the reward of the agentrl side of benchmarks/vs_trl.py."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl_core.api.hooks import hookimpl
from agentrl_core.api.reward import RewardTrajectory

sys.path.insert(0, str(Path(__file__).parent))
from _turns import Turn, score  # noqa: E402 - the run loads this file alone, its folder is not on the path


class TakeTurns:
    """Every step of the run waits for the other side's."""

    def __init__(self, config: Any, context: Any) -> None:
        self._turn = Turn()

    @hookimpl
    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        kept = ("timing/", "perf/", "response_length/mean")
        self._turn.step_ended({name: value for name, value in metrics.items() if name.startswith(kept)})


def distinct(trajectory: RewardTrajectory) -> float:
    """As the other side scores it."""
    return score(trajectory.model_text)
