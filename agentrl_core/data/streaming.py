"""Training rows that are read, checked and measured when their turn comes."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, overload

from agentrl_core.api import DataError, PromptDataset
from agentrl_core.data.rows import Row

logger = logging.getLogger(__name__)


class StreamedRows(Sequence[Row]):
    """The rows of a dataset, then ``tasks``. No row is kept in memory.

    A row whose prompt is too long is replaced by the next one that fits. What a number stands for depends on the
    data alone, so a resumed run gets the same prompts.

    Args:
        dataset: all of its rows, in their order.
        prepare: checks and completes a row, given with its number; None: its prompt is too long.
        tasks: ready rows.

    Raises:
        DataError: from indexing: a row cannot be used, or none fits.
    """

    def __init__(
        self, dataset: PromptDataset, prepare: Callable[[int, Row], Row | None], tasks: Sequence[Row] = ()
    ) -> None:
        self._dataset, self._prepare, self._tasks = dataset, prepare, tasks
        self._replaced = False

    def __len__(self) -> int:
        return len(self._dataset) + len(self._tasks)

    @overload
    def __getitem__(self, number: int) -> Row: ...
    @overload
    def __getitem__(self, number: slice) -> list[Row]: ...
    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        if number >= len(self._dataset):
            return self._tasks[number - len(self._dataset)]
        return self._first_that_fits(number)

    def _first_that_fits(self, number: int) -> Row:
        size = len(self._dataset)
        for found in ((number + offset) % size for offset in range(size)):
            if (row := self._prepare(found, self._dataset[found])) is not None:
                return row
            if not self._replaced:
                self._replaced = True
                logger.warning(
                    "data: train row %d is longer than data.max_prompt_length; the next row that fits takes its place, "
                    "here and wherever this happens again", found,
                )  # fmt: skip
        raise DataError(
            f"data: no train prompt is left: all {size} rows are longer than data.max_prompt_length tokens (tool "
            "schemas included)"
        )
