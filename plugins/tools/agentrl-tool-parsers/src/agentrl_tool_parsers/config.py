"""Options of the parsers."""

from dataclasses import dataclass

from agentrl_core.api import option


@dataclass
class HermesConfig:
    starts_in_think: bool = option(
        False, help="the chat template's generation prompt ends with <think>: a turn begins inside the reasoning"
    )
