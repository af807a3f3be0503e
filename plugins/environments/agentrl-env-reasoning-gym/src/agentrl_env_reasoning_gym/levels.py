"""A sampler that raises the level of each data source as its rewards rise."""

import logging
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentrl_core.api import PromptOutcome, PromptSampler, SamplerContext
from agentrl_env_reasoning_gym.config import LevelsConfig

logger = logging.getLogger(__name__)


class Levels(PromptSampler):
    """Draws rows of the current level of each ``data_source``, and some of lower ones.

    A row's level is ``extra_info.level``, 0 without one. A source is drawn in proportion to its rows of the lowest
    level. It goes up when the mean reward of its latest ``window`` prompts of the current level is ``threshold``.
    """

    def __init__(self, config: LevelsConfig, context: SamplerContext) -> None:
        self._config = config
        self._context = context
        rows: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for number, row in enumerate(context.rows):
            level = int((row.get("extra_info") or {}).get("level") or 0)
            rows[str(row.get("data_source") or "default")][level].append(number)
        self._rows = {source: [rows[source][level] for level in sorted(rows[source])] for source in sorted(rows)}
        self._place = {
            number: (source, level)
            for source, levels in self._rows.items()
            for level, numbers in enumerate(levels)
            for number in numbers
        }
        self.level = dict.fromkeys(self._rows, 0)
        self._latest = {source: deque[float](maxlen=config.window) for source in self._rows}

    def batch(self, step: int) -> list[int]:
        random = np.random.default_rng([self._context.seed, step])
        sources = list(self._rows)
        weights = np.array([len(self._rows[source][0]) for source in sources], dtype=float)
        chosen = []
        for pick in random.choice(len(sources), self._context.batch_size, p=weights / weights.sum()):
            source = sources[pick]
            level = self.level[source]
            # Both numbers are drawn each time, so that a level changes nothing else in the batch.
            reviewed, place = random.random() < self._config.review, random.random(2)
            if reviewed and level:
                level = int(place[0] * level)
            numbers = self._rows[source][level]
            chosen.append(numbers[int(place[1] * len(numbers))])
        return chosen

    def update(self, step: int, outcomes: Sequence[PromptOutcome]) -> None:
        for outcome in outcomes:
            source, level = self._place[outcome.row]
            if not outcome.rewards or level != self.level[source]:
                continue
            latest = self._latest[source]
            latest.append(float(np.mean(outcome.rewards)))
            full = len(latest) == self._config.window
            if full and np.mean(latest) >= self._config.threshold and level + 1 < len(self._rows[source]):
                self.level[source] += 1
                latest.clear()
                logger.info("step %d: %s goes on to level %d", step, source, self.level[source])

    def state_dict(self) -> dict[str, Any]:
        return {"level": dict(self.level), "latest": {source: list(each) for source, each in self._latest.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for source, level in state.get("level", {}).items():
            if source in self.level:
                self.level[source] = min(level, len(self._rows[source]) - 1)
                self._latest[source].extend(state["latest"][source])
