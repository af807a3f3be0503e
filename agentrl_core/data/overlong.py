"""What happens to prompts that are longer than the limit."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from agentrl_core.api import DataError, DatasetContext, PromptDataset
from agentrl_core.data.rows import Row

logger = logging.getLogger(__name__)


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

    def with_text(shorter: str) -> tuple[Row, int]:
        changed = {**row, "raw_prompt": [*messages[:at], {**messages[at], "content": shorter}, *messages[at + 1 :]]}
        return changed, lengths_of([changed])[0]

    # What the text may take is what the run's renderer leaves of the limit without it.
    empty = with_text("") if at >= 0 else (row, length)
    budget = context.max_prompt_length - empty[1]
    while at >= 0 and budget > 0:
        found, length = with_text(context.renderer.truncate(text, budget, side))  # type: ignore[arg-type]
        if length <= context.max_prompt_length:
            return found, length
        # Cutting can change how the rest is tokenised, so a cut that is still too long is repeated.
        budget -= length - context.max_prompt_length
    found, length = empty
    if length > context.max_prompt_length:
        raise DataError(
            f"data: {context.split} row {index}: even with an empty last user message the prompt has {length} tokens, "
            f"more than data.max_prompt_length={context.max_prompt_length}"
        )
    return found, length
