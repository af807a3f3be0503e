"""Prompts from parquet or JSON-lines files, through Hugging Face ``datasets``.

Columns: ``prompt`` (messages), ``data_source``, ``agent_name``, ``reward_model.ground_truth``, ``extra_info`` with
``index``, ``tools_kwargs``, ``interaction_kwargs``; others are passed on as they are.
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets

from agentrl_core.api import DataError, DatasetContext, PromptDataset
from agentrl_core.data.config import PromptsConfig
from agentrl_core.data.rows import Row
from agentrl_core.plugins.boundary import boundary

_READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}
logger = logging.getLogger(__name__)


class PromptsFromFiles(PromptDataset):
    """Random access to the rows of several files, in their order.

    Raises:
        DataError: a file that cannot be read, lacks the prompt column, or holds a row that cannot be used; the
            message names file and row.
    """

    def __init__(self, config: PromptsConfig, context: DatasetContext) -> None:
        self._rows: list[Row] = []
        for file in context.files:
            rows = _read(file)
            if config.prompt_key not in rows.column_names:
                raise DataError(
                    f"{file}: no column {config.prompt_key!r}; it has {', '.join(rows.column_names)}. "
                    "Set data.dataset.config.prompt_key to the column that holds the messages"
                )
            self._rows += [_normalise(dict(row), config, f"{file}, row {number}") for number, row in enumerate(rows)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return dict(self._rows[index])


def _read(file: str) -> datasets.Dataset:
    reader = _READERS.get(Path(file).suffix)
    if reader is None:
        raise DataError(f"{file}: unknown file type; allowed are {', '.join(_READERS)}")
    if not Path(file).is_file():
        raise DataError(f"{file}: no such file")
    if not Path(file).stat().st_size:
        raise DataError(f"{file}: the file is empty; expected one row per line, with a prompt")
    with boundary(DataError, f"{file}: cannot be read as {reader}:"), _no_progress_bars():
        return datasets.load_dataset(reader, data_files=file, split="train")


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    disabled = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not disabled:
            datasets.enable_progress_bars()


def _normalise(row: Row, config: PromptsConfig, where: str) -> Row:
    prompt = row.pop(config.prompt_key)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt or not all(isinstance(m, dict) and "role" in m for m in prompt):
        raise DataError(
            f"{where}: {config.prompt_key!r} must be a text or a list of messages with role and content, "
            f"found {json.dumps(prompt, default=str)[:80]}"
        )
    row = {key: drop_none(value) for key, value in row.items() if value is not None}
    reward_model = row.get("reward_model")
    if config.require_ground_truth and (not isinstance(reward_model, dict) or "ground_truth" not in reward_model):
        raise DataError(
            f"{where}: no reward_model.ground_truth; add it, or set data.dataset.config.require_ground_truth=false "
            "if the reward does not need it"
        )
    row["raw_prompt"] = [drop_none(message) for message in prompt]
    return row


def drop_none(value: Any) -> Any:
    """The value without None entries of dicts: parquet gives every row the union of all rows' keys."""
    if isinstance(value, dict):
        return {key: drop_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [drop_none(item) for item in value]
    return value


def fit_prompts(
    dataset: PromptDataset, context: DatasetContext, overlong: str, lengths_of: Callable[[list[Row]], Sequence[int]]
) -> tuple[list[Row], int]:
    """The rows whose rendered prompt fits ``max_prompt_length``, and the length of the longest one.

    Args:
        overlong: ``filter`` drops the others, ``error`` refuses them, ``left``/``right``/``middle`` cut their last
            user message at that side.
        lengths_of: tokens of each row's prompt as the agent loop will render it, tool schemas included.

    Raises:
        DataError: a prompt is too long under ``error``, cannot be cut enough, or nothing is left.
    """
    rows = [dataset[index] for index in range(len(dataset))]
    kept: list[Row] = []
    longest = 0
    for index, (row, length) in enumerate(zip(rows, lengths_of(rows), strict=True)):
        if length <= context.max_prompt_length:
            kept.append(row)
            longest = max(longest, length)
        elif overlong == "error":
            raise DataError(
                f"data: {context.split} row {index} has a prompt of {length} tokens (tool schemas included), more than "
                f"data.max_prompt_length={context.max_prompt_length}; raise it, or set data.overlong_prompts to "
                "filter, left, right or middle"
            )
        elif overlong != "filter":
            row, length = _cut(row, index, length, context, overlong, lengths_of)
            kept.append(row)
            longest = max(longest, length)
    dropped = len(dataset) - len(kept)
    if dropped:
        logger.warning(
            "data: %d of %d %s prompts are longer than data.max_prompt_length=%d tokens and were dropped",
            dropped, len(dataset), context.split, context.max_prompt_length,
        )  # fmt: skip
    if not kept:
        raise DataError(
            f"data: no {context.split} prompt is left: {len(dataset)} rows in {', '.join(context.files)}, all longer "
            f"than data.max_prompt_length={context.max_prompt_length} tokens (tool schemas included)"
        )
    return kept, longest


def _cut(
    row: Row,
    index: int,
    length: int,
    context: DatasetContext,
    side: str,
    lengths_of: Callable[[list[Row]], Sequence[int]],
) -> tuple[Row, int]:
    messages: Sequence[dict[str, Any]] = row["raw_prompt"]
    at = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    text = messages[at].get("content", "")
    if not isinstance(text, str):
        raise DataError(
            f"{context.split} row {index}: the prompt has {length} tokens, more than data.max_prompt_length="
            f"{context.max_prompt_length}, and a content that is not a text cannot be cut; set "
            "data.overlong_prompts=filter"
        )
    budget = len(context.renderer.encode(text))
    # Cutting can change how the rest is tokenised, so a cut that is still too long is repeated.
    while at >= 0 and budget > 0 and length > context.max_prompt_length:
        budget -= length - context.max_prompt_length
        cut = {**messages[at], "content": context.renderer.truncate(text, max(budget, 0), side)}  # type: ignore[arg-type]
        row = {**row, "raw_prompt": [*messages[:at], cut, *messages[at + 1 :]]}
        [length] = lengths_of([row])
    if length > context.max_prompt_length:
        raise DataError(
            f"data: {context.split} row {index}: even with an empty last user message the prompt has {length} tokens, "
            f"more than data.max_prompt_length={context.max_prompt_length}"
        )
    return row, length
