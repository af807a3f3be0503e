"""The prompts of one rollout, as they travel to the agent-loop workers: plain dataset rows."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Self

Row = dict[str, Any]
SOURCES = "image_sources"
"""Key of a row whose prompt has images: what they are made of, by name. It stays in the trainer's process."""


@dataclass(frozen=True)
class PromptBatch:
    """Rows to sample trajectories for.

    Args:
        rows: one per trajectory, with ``uid`` (of its prompt), ``prompt_index`` and ``sample_index``. Samples of one
            prompt share what is inside their rows.
        sampling: what :meth:`Trajectory.generate` takes.
        attempt: number of the first attempt; above 0 where a worker with these rows has died.
    """

    rows: Sequence[Row]
    step: int
    split: str
    sampling: Mapping[str, Any]
    attempt: int = 0

    @classmethod
    def sampled(
        cls, rows: Sequence[Mapping[str, Any]], step: int, split: str, n: int, sampling: Mapping[str, Any]
    ) -> Self:
        """``n`` neighbouring rows for each prompt in ``rows``."""
        repeated = [
            {**row, "uid": f"{split}-{step:06d}-{prompt:05d}", "prompt_index": prompt, "sample_index": sample}
            for prompt, row in enumerate(rows)
            for sample in range(n)
        ]
        return cls(repeated, step, split, sampling)

    def greedy(self) -> Self:
        """One greedy answer to each prompt, under the same ``uid``."""
        rows = [row for row in self.rows if row["sample_index"] == 0]
        return replace(self, rows=rows, split=f"{self.split}.greedy", sampling={**self.sampling, "temperature": 0.0})

    def __len__(self) -> int:
        return len(self.rows)

    def first(self, prompts: int) -> Self:
        """The samples of the first so many prompts."""
        return replace(self, rows=[row for row in self.rows if row["prompt_index"] < prompts])

    def pieces(self, most: int) -> list[Self]:
        """Batches of at most ``most`` samples of one prompt each."""
        groups = (list(rows) for _, rows in groupby(self.rows, key=lambda row: row["uid"]))
        return [
            replace(self, rows=rows[start : start + most]) for rows in groups for start in range(0, len(rows), most)
        ]

    def chunk(self, chunks: int) -> list[Self]:
        """At most ``chunks`` batches of consecutive rows, none of them empty; lengths differ by at most one."""
        base, longer = divmod(len(self), chunks)
        ends = [number * base + min(number, longer) for number in range(chunks + 1)]
        return [
            replace(self, rows=self.rows[start:end]) for start, end in zip(ends, ends[1:], strict=False) if end > start
        ]


def fingerprint(rows: Sequence[dict[str, Any]], most: int | None = None) -> str:
    """A hash of the prompts, or tasks, in their order; a checkpoint keeps it to notice that the data has changed.

    Args:
        most: hash about so many, spread over the rows, and the number of rows; None: all.
    """
    digest = hashlib.sha256() if most is None else hashlib.sha256(f"{len(rows)} rows ".encode())
    for number in range(0, len(rows), 1 if most is None else max(1, len(rows) // most)):
        row = rows[number]
        digest.update(json.dumps(row["raw_prompt"] or row, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]
