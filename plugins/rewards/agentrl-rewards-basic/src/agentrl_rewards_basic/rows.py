"""What reward functions read of a row and of an answer."""

import re
from typing import Any

from agentrl_core.api import RewardTrajectory


def ground_truth(trajectory: RewardTrajectory, name: str) -> str:
    """The ground truth as text.

    Raises:
        ValueError: the row has none; ``name`` is the function that asks.
    """
    truth: Any = trajectory.ground_truth
    text = "" if truth is None or truth == [] else str(truth).strip()
    if not text:
        raise ValueError(f"{name}: {row_of(trajectory)} has no reward_model.ground_truth")
    return text


def row_of(trajectory: RewardTrajectory) -> str:
    """How messages name the row."""
    source = f" of {trajectory.data_source!r}" if trajectory.data_source else ""
    return f"row {trajectory.extra_info.get('index', '(without extra_info.index)')}{source}"


def answer_text(trajectory: RewardTrajectory, tag: str | None) -> str | None:
    """The last turn or, with a tag, what its last ``<tag>…</tag>`` holds; None where that is missing."""
    if tag is None:
        return trajectory.last_text
    _, opening, tail = trajectory.last_text.rpartition(f"<{tag}>")
    text, closing, _ = tail.partition(f"</{tag}>")
    return text if opening and closing else None


def without_fence(text: str) -> str:
    """What a Markdown code fence around the whole text holds; the text itself where there is none."""
    match = re.fullmatch(r"\s*```\w*\n(.*?)\n?```\s*", text, re.DOTALL)
    return match.group(1) if match else text
