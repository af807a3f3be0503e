"""Options of the environment and of the sampler."""

from dataclasses import dataclass
from typing import Any

from agentrl_core.api import option


@dataclass
class DataSetConfig:
    weight: float = option(1.0, gt=0, help="share of the tasks, relative to those of the other data sets")
    config: dict[str, Any] = option(
        default_factory=dict, help="options of the data set, as in reasoning_gym.create_dataset, without seed and size"
    )
    curriculum: bool = option(False, help="tasks of every level of the data set's curriculum; see the sampler levels")


@dataclass(kw_only=True)
class ReasoningGymConfig:
    datasets: dict[str, DataSetConfig] = option(help="data sets by name, such as {countdown: {}, maze: {weight: 0.5}}")
    tasks: int = option(
        10_000, ge=1, help="number of training tasks, over all data sets; of each level if there are any"
    )
    validation_tasks: int = option(200, ge=0, help="number of validation tasks, over all data sets and levels")
    seed: int = option(0, ge=0, help="seed of the data sets; validation tasks have another one")
    system_prompt: str | None = option(
        "default",
        help="a text, or the name of a system prompt of reasoning-gym (default, simple, direct, …); null: none",
    )
    answer_tag: str | None = option(
        "answer", help="take the answer from the last <tag>…</tag> of the last turn; null: the whole turn"
    )


@dataclass
class LevelsConfig:
    threshold: float = option(0.8, help="mean reward at which a data_source goes on to its next level")
    window: int = option(64, ge=1, unit="prompts", help="number of latest prompts of the level over which the mean is")
    review: float = option(0.2, ge=0, lt=1, help="share of the prompts that are from lower levels")
