"""Which prompts a step trains on: in order, shuffled, by weights of their sources, or by their success so far."""

import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentrl_core.api import DataError, NoConfig, PromptOutcome, PromptSampler, SamplerContext
from agentrl_dataset_prompts.config import CurriculumConfig, MixtureConfig

logger = logging.getLogger(__name__)


class _Stream:
    """An endless stream over some rows; epochs follow each other without a gap, each in a new order if ``seeds`` are
    given."""

    def __init__(self, rows: Sequence[int], seeds: Sequence[int] | None) -> None:
        self._rows = np.asarray(rows)
        self._seeds = seeds
        self._epoch = -1
        self._order = self._rows

    def __getitem__(self, position: int) -> int:
        epoch, offset = divmod(position, len(self._rows))
        if self._seeds is not None and epoch != self._epoch:
            self._order = self._rows[np.random.default_rng([*self._seeds, epoch]).permutation(len(self._rows))]
            self._epoch = epoch
        return int(self._order[offset])


class Sequential(PromptSampler):
    """The rows in the order of the files, again and again."""

    def __init__(self, config: NoConfig, context: SamplerContext) -> None:
        self._size = context.batch_size
        self._stream = _Stream(range(len(context.rows)), self._seeds(context))

    def _seeds(self, context: SamplerContext) -> Sequence[int] | None:
        return None

    def batch(self, step: int) -> list[int]:
        first = (step - 1) * self._size
        return [self._stream[position] for position in range(first, first + self._size)]


class Shuffle(Sequential):
    """All rows in every epoch, in a new order each time."""

    def _seeds(self, context: SamplerContext) -> Sequence[int] | None:
        return [context.seed]


class Mixture(PromptSampler):
    """A share of each batch from each ``data_source``; the rows of a source come shuffled, all of them in turn.

    A source gets its share of a batch up to one prompt, and exactly on average: systematic sampling.

    Raises:
        DataError: a source has a weight but no rows, or rows but no weight; weights are negative or all 0.
    """

    def __init__(self, config: MixtureConfig, context: SamplerContext) -> None:
        self._context = context
        rows: dict[str, list[int]] = defaultdict(list)
        for number, row in enumerate(context.rows):
            rows[str(row.get("data_source") or "default")].append(number)
        _check_weights(config.weights, rows)
        used = sorted(source for source, weight in config.weights.items() if weight)
        bounds = np.cumsum([config.weights[source] for source in used])
        self._bounds = bounds / bounds[-1]
        self._streams = [_Stream(rows[source], [context.seed, number]) for number, source in enumerate(used)]
        self._drawn = [np.zeros(len(used), dtype=np.int64)]
        """Rows that each source has given before each step; computed again after a restart."""

    def batch(self, step: int) -> list[int]:
        while len(self._drawn) <= step:
            counts = np.bincount(self._sources(len(self._drawn)), minlength=len(self._streams))
            self._drawn.append(self._drawn[-1] + counts)
        positions = self._drawn[step - 1].copy()
        chosen = []
        for source in self._sources(step):
            chosen.append(self._streams[source][int(positions[source])])
            positions[source] += 1
        return chosen

    def _sources(self, step: int) -> Any:
        size = self._context.batch_size
        offset = np.random.default_rng([self._context.seed, step]).random()
        points = (np.arange(size) + offset) / size
        # Rounding can leave the last point at 1.
        return np.minimum(np.searchsorted(self._bounds, points, side="right"), len(self._streams) - 1)


def _check_weights(weights: Mapping[str, float], rows: Mapping[str, Sequence[int]]) -> None:
    key = "data.sampler.config.weights"
    found = ", ".join(f"{source} ({len(numbers)} rows)" for source, numbers in sorted(rows.items()))
    if empty := sorted(weights.keys() - rows.keys()):
        raise DataError(
            f"{key}: no training row has the data_source {', '.join(empty)}; there are {found}. Rows that are longer "
            "than data.max_prompt_length do not count"
        )
    if missing := sorted(rows.keys() - weights.keys()):
        raise DataError(f"{key}: no weight for {', '.join(missing)}; give each source one, 0 to leave it out")
    if any(not math.isfinite(weight) or weight < 0 for weight in weights.values()) or not sum(weights.values()):
        raise DataError(f"{key}: found {dict(weights)}; allowed are numbers from 0 on, at least one above 0")


class Curriculum(PromptSampler):
    """Draws prompts whose recent mean reward is near ``target``, without repetition within a batch.

    Rewards are scaled to 0..1 by the range that the reward functions declare; without one they should be in 0..1.
    The weight of a prompt is exp(-((mean - target) / width)^2 / 2), at least ``floor``; a prompt that was never tried
    has weight 1. The mean is exponential: half of it is the last step in which the prompt was drawn. Prompts that
    always or never succeed have no advantage in group-based estimators, so they are drawn rarely.

    Weighted sampling without replacement: Efraimidis and Spirakis 2006, the largest u^(1 / weight).
    """

    def __init__(self, config: CurriculumConfig, context: SamplerContext) -> None:
        self._config = config
        self._context = context
        self._means = np.full(len(context.rows), np.nan)
        self._warned = False

    def batch(self, step: int) -> list[int]:
        random = np.random.default_rng([self._context.seed, step])
        distance = (self._means - self._config.target) / self._config.width
        weights = np.where(np.isnan(distance), 1.0, np.maximum(np.exp(-(distance**2) / 2), self._config.floor))
        chosen: list[int] = []
        while len(chosen) < self._context.batch_size:
            order = np.argsort(np.log(1 - random.random(len(weights))) / weights)[::-1]
            chosen += order[: self._context.batch_size - len(chosen)].tolist()
        return chosen

    def update(self, step: int, outcomes: Sequence[PromptOutcome]) -> None:
        for outcome in outcomes:
            if outcome.rewards:
                mean, before = self._scaled(float(np.mean(outcome.rewards))), self._means[outcome.row]
                self._means[outcome.row] = mean if np.isnan(before) else (before + mean) / 2

    def _scaled(self, reward: float) -> float:
        low, high = self._context.reward_range or (0.0, 1.0)
        if not low <= reward <= high and not self._warned:
            self._warned = True
            logger.warning(
                "data.sampler=curriculum: a mean reward of %g is outside of %g..%g and counts as the nearest end. "
                "Declare reward.functions[].range", reward, low, high,
            )  # fmt: skip
        return min(max((reward - low) / (high - low), 0.0), 1.0)

    def state_dict(self) -> dict[str, Any]:
        tried = np.flatnonzero(~np.isnan(self._means))
        return {"means": {str(row): float(self._means[row]) for row in tried}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for row, mean in state.get("means", {}).items():
            self._means[int(row)] = mean
