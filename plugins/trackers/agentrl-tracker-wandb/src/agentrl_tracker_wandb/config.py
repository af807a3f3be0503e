"""Options of the tracker."""

from dataclasses import dataclass
from typing import Literal

from agentrl_core.api import option


@dataclass
class WandbConfig:
    mode: Literal["offline", "online"] = option(
        "offline", help="offline: write wandb/ in the run's directory, for `wandb sync`; online: send while training"
    )
    project: str = option("agentrl", help="W&B project")
    entity: str | None = option(None, help="W&B user or team; null: the default one of the account")
    group: str | None = option(None, help="W&B group of the run; null: none")
    tags: list[str] = option(default_factory=list, help="W&B tags of the run")
    trajectories: int = option(8, ge=0, help="trajectories of each rollout that go into its table; 0: no tables")
