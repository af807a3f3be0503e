"""Which prompts a step trains on: a pure function of seed and step, so that resuming needs no state."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np


class PromptSampler:
    """An endless stream over a dataset, cut into batches; epochs follow each other without a gap.

    Args:
        size: rows in the dataset, at least 1.
        batch_size: prompts of one step; may exceed ``size``.
        seed: of the run.
        shuffle: a new permutation every epoch.
    """

    def __init__(self, size: int, batch_size: int, seed: int, shuffle: bool) -> None:
        self.size = size
        self.batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order = np.arange(size)

    def batch(self, step: int) -> list[int]:
        """Row numbers of step ``step`` (from 1)."""
        first = (step - 1) * self.batch_size
        return [self._row(position) for position in range(first, first + self.batch_size)]

    def _row(self, position: int) -> int:
        epoch, offset = divmod(position, self.size)
        if self._shuffle and epoch != self._epoch:
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self.size)
            self._epoch = epoch
        return int(self._order[offset])


def fingerprint(rows: Sequence[dict[str, Any]]) -> str:
    """A hash of the prompts in their order; a checkpoint keeps it to notice that the data has changed."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row["raw_prompt"], sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]
