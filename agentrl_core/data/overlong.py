"""What happens to prompts that are longer than the limit."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from agentrl_core.api import DataError, DatasetContext
from agentrl_core.data.rows import Row

logger = logging.getLogger(__name__)


Lengths = Callable[[Sequence[Row]], Sequence[int]]
"""Tokens of each row's prompt as the agent loop will render it, tool schemas included."""


def fit_prompts(
    rows: Sequence[Row], context: DatasetContext, overlong: str, lengths_of: Lengths
) -> tuple[list[Row], int]:
    """The rows whose rendered prompt fits ``max_prompt_length``, and the length of the longest one.

    Args:
        overlong: ``filter`` drops the others, ``error`` refuses them, ``left``/``right``/``middle`` cut their last
            user message at that side.

    Raises:
        DataError: a prompt is too long under ``error``, cannot be cut enough, or nothing is left.
    """
    measured = enumerate(zip(rows, lengths_of(rows), strict=True))
    fitted = (fit_prompt(row, index, length, context, overlong, lengths_of) for index, (row, length) in measured)
    kept = [found for found in fitted if found is not None]
    dropped = len(rows) - len(kept)
    if dropped:
        logger.warning(
            "data: %d of %d %s prompts are longer than data.max_prompt_length=%d tokens and were dropped",
            dropped, len(rows), context.split, context.max_prompt_length,
        )  # fmt: skip
    if not kept:
        raise DataError(
            f"data: no {context.split} prompt is left: {len(rows)} rows in {', '.join(context.files)}, all longer "
            f"than data.max_prompt_length={context.max_prompt_length} tokens (tool schemas included)"
        )
    return [row for row, _ in kept], max(length for _, length in kept)


def fit_prompt(
    row: Row, index: int, length: int, context: DatasetContext, overlong: str, lengths_of: Lengths
) -> tuple[Row, int] | None:
    """The row, cut where ``overlong`` says so, and the length of its prompt; None: it is dropped.

    Raises:
        DataError: as :func:`fit_prompts`.
    """
    if length <= context.max_prompt_length:
        return row, length
    if overlong == "error":
        raise DataError(
            f"data: {context.split} row {index} has a prompt of {length} tokens (tool schemas included), more than "
            f"data.max_prompt_length={context.max_prompt_length}; raise it, or set data.overlong_prompts to "
            "filter, left, right or middle"
        )
    return None if overlong == "filter" else _cut(row, index, length, context, overlong, lengths_of)


def _cut(
    row: Row,
    index: int,
    length: int,
    context: DatasetContext,
    side: str,
    lengths_of: Lengths,
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
