"""Options of the tracker."""

from dataclasses import dataclass
from typing import Literal

from agentrl_core.api import option


@dataclass
class SwanlabConfig:
    mode: Literal["offline", "online"] = option(
        "offline",
        help="offline: write swanlog/ in the run's directory, for `swanlab sync`; online: send while training",
    )
    project: str = option("agentrl", help="SwanLab project")
    workspace: str | None = option(None, help="SwanLab user or organization; null: the default one of the account")
    trajectories: int = option(8, ge=0, help="trajectories of each rollout that are logged as texts; 0: none")
