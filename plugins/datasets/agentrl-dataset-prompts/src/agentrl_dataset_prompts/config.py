"""Options of the dataset."""

from dataclasses import dataclass

from agentrl_core.api import option


@dataclass
class PromptsConfig:
    prompt_key: str = option("prompt", help="column with the messages (or one string, taken as a user message)")
    require_ground_truth: bool = option(True, help="every row needs reward_model.ground_truth")
