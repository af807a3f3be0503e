"""Options of the dataset and of the samplers."""

from dataclasses import dataclass

from agentrl_core.api import option


@dataclass
class PromptsConfig:
    prompt_key: str = option("prompt", help="column with the messages (or one string, taken as a user message)")
    image_key: str = option("images", help="column with the images of a row: a list, or one image")
    require_ground_truth: bool = option(True, help="every row needs reward_model.ground_truth")


@dataclass
class MixtureConfig:
    weights: dict[str, float] = option(help="weight of each data_source, such as {gsm8k: 0.7, math: 0.3}; 0: left out")


@dataclass
class CurriculumConfig:
    target: float = option(
        0.5, ge=0, le=1, help="mean reward of the prompts that are drawn most, as a share of the declared range"
    )
    width: float = option(0.25, gt=0, help="distance from the target at which the weight has fallen to 0.61")
    floor: float = option(0.05, gt=0, le=1, help="lowest weight of a prompt; that of an untried prompt is 1")
