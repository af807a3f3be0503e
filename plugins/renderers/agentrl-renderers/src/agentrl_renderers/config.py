"""The options."""

from dataclasses import dataclass
from typing import Any

from agentrl_core.api import option


@dataclass
class FamilyConfig:
    family: str = option(help="the family's name in the renderers package, such as qwen3, qwen3.5, glm-4.5 or kimi-k2")
    options: dict[str, Any] = option(default_factory=dict, help="options of that family's renderer, by name")
