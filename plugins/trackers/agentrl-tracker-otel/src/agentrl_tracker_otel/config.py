"""Options of the tracker."""

from dataclasses import dataclass

from agentrl_core.api import option


@dataclass
class OtelConfig:
    endpoint: str | None = option(
        None, help="OTLP/HTTP address that gets the traces, such as http://localhost:4318/v1/traces; null: none"
    )
    file: bool = option(True, help="write traces.jsonl into the run's directory, in OTLP's JSON")
    sample: float = option(
        0.1, ge=0, le=1, help="share of the trajectories that are traced, next to the failed and the slowest ones"
    )
    messages: bool = option(False, help="put the conversation into the span of its trajectory")
