"""Options of the trackers."""

from dataclasses import dataclass

from agentrl_core.api import option


@dataclass
class ConsoleConfig:
    live: bool | None = option(None, help="redraw one panel in place; null: where standard output is a terminal")
