"""The data sets of reasoning-gym as one environment."""

import asyncio
import difflib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from reasoning_gym.factory import CURRICULA, DATASETS, create_curriculum, create_dataset
from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer

from agentrl_core.api import (
    ConfigError,
    Environment,
    EnvironmentContext,
    Episode,
    RewardResult,
    RewardTrajectory,
)
from agentrl_core.api.dataset import Split
from agentrl_env_reasoning_gym.config import DataSetConfig, ReasoningGymConfig

VALIDATION_SEED = 1_000_000_007
"""Added to the seed: item i of a data set is made from seed + i, so splits never meet."""


class ReasoningGym(Environment):
    """A weighted mixture of procedural data sets; ``data_source`` is the name of the data set.

    Raises:
        ConfigError: an unknown data set, options that it refuses, or no curriculum where one is asked for.
    """

    config: ReasoningGymConfig

    def __init__(self, config: ReasoningGymConfig, context: EnvironmentContext) -> None:
        super().__init__(config, context)
        if not config.datasets:
            raise ConfigError(f"environment {context.name!r}: datasets is empty; name one, such as {{countdown: {{}}}}")
        self._made: dict[tuple[str, int, str], Any] = {}
        self._lock = threading.Lock()
        for name, options in config.datasets.items():
            self._check(name, options)
        self._system = SYSTEM_PROMPTS.get(config.system_prompt or "", config.system_prompt)

    def _check(self, name: str, options: DataSetConfig) -> None:
        where = f"environment {self.context.name!r}: datasets.{name}"
        if name == "composite":
            raise ConfigError(f"{where}: list the data sets of the mixture here instead")
        if name not in DATASETS:
            close = difflib.get_close_matches(name, DATASETS, 3)
            hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(sorted(DATASETS))}"
            raise ConfigError(f"{where}: reasoning-gym has no such data set; {hint}")
        if options.curriculum and name not in CURRICULA:
            raise ConfigError(f"{where}: this data set has no curriculum; set curriculum to false")
        if reserved := sorted({"seed", "size"} & options.config.keys()):
            raise ConfigError(f"{where}.config: {', '.join(reserved)} cannot be set here; use seed and tasks beside it")
        try:
            self._dataset(name, 0, "train")
        except Exception as error:
            raise ConfigError(f"{where}.config: {type(error).__name__}: {error}") from error

    def levels(self, name: str) -> int:
        """Number of levels of a data set; 1 without a curriculum."""
        if not self.config.datasets[name].curriculum:
            return 1
        return max(len(each.levels) for each in create_curriculum(name).attributes.values())

    def tasks(self, split: Split) -> Sequence[Mapping[str, Any]]:
        rows: list[Mapping[str, Any]] = []
        for name in self.config.datasets:
            levels = self.levels(name)
            for level in range(levels):
                count = self._count(name, split)
                if split == "validation":
                    count = count // levels + (level < count % levels)
                rows += [
                    {"data_source": name, "extra_info": {"split": split, "level": level, "index": index}}
                    for index in range(count)
                ]
        return rows

    def _count(self, name: str, split: str) -> int:
        """Tasks of a data set: its share, rounded so that the sum is right."""
        total = self.config.tasks if split == "train" else self.config.validation_tasks
        weights = {each: options.weight for each, options in self.config.datasets.items()}
        before = sum(weight for each, weight in list(weights.items())[: list(weights).index(name)])
        whole = sum(weights.values())
        return round(total * (before + weights[name]) / whole) - round(total * before / whole)

    async def open(self, task: Mapping[str, Any], seed: int) -> Episode:
        place = task["extra_info"]
        dataset, entry = await asyncio.to_thread(
            self._entry, task["data_source"], place["level"], place["split"], place["index"]
        )
        return _Question(dataset, entry, self._system, self.config.answer_tag)

    def _entry(self, name: str, level: int, split: str, index: int) -> tuple[Any, dict[str, Any]]:
        # Data sets may keep state while they make an item.
        with self._lock:
            dataset = self._dataset(name, level, split)
            if not 0 <= index < len(dataset):
                raise IndexError(f"data set {name} has the {split} tasks 0 to {len(dataset) - 1}, not {index}")
            return dataset, dataset[index]

    def _dataset(self, name: str, level: int, split: str) -> Any:
        key = name, level, split
        if key not in self._made:
            options = self.config.datasets[name]
            seed = self.config.seed + (VALIDATION_SEED if split == "validation" else 0)
            given = {**options.config, "seed": seed, "size": max(self._count(name, split), 1)}
            if options.curriculum:
                curriculum = create_curriculum(name)
                curriculum.set_global_level(level)
                cls, _ = DATASETS[name]
                self._made[key] = cls(curriculum.generate_configuration(given))
            else:
                self._made[key] = create_dataset(name, **given)
        return self._made[key]


class _Question(Episode):
    def __init__(self, dataset: Any, entry: dict[str, Any], system: str | None, tag: str | None) -> None:
        self._dataset = dataset
        self._entry = entry
        self._tag = tag
        self.messages = [{"role": "system", "content": system}] if system else []
        self.messages += [{"role": "user", "content": entry["question"]}]

    async def score(self, trajectory: RewardTrajectory) -> RewardResult:
        """The scorer's number. A scorer that fails on what the policy wrote gives 0, counted as ``scorer_errors``."""
        text = trajectory.last_text
        answer = text.strip() if self._tag is None else extract_answer(text, self._tag)
        parts = {"answered": float(bool(answer))}
        if not answer:
            return RewardResult(0.0, components=parts, answer="")
        try:
            score = float(await asyncio.to_thread(self._dataset.score_answer, answer, self._entry))
        except Exception:  # noqa: BLE001 - scorers parse what the policy wrote
            return RewardResult(0.0, metrics={"scorer_errors": 1.0}, components=parts, answer=answer)
        return RewardResult(score, components=parts, answer=answer)
