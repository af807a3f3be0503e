"""Options of the tracker."""

from dataclasses import dataclass

from agentrl_core.api import option


@dataclass
class TrackioConfig:
    project: str = option("agentrl", help="Trackio project")
    space_id: str | None = option(None, help="Hugging Face Space that receives the run; null: this machine only")
    server_url: str | None = option(None, help="self-hosted Trackio server that receives the run; null: none")
    trajectories: int = option(8, ge=0, help="trajectories of each rollout that go into its table; 0: no tables")
