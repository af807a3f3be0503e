"""A tutor: judges the answer, and gives another try."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl_core.api import Interaction, InteractionContext, InteractionTurn
from agentrl_core.api.message_parts import text_of
from agentrl_interactions_basic.config import TutorConfig

_NUMBER = re.compile(r"([+-]?)\$?([0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(\.[0-9]*)?")


@dataclass
class _Lesson:
    ground_truth: str
    scores: list[float] = field(default_factory=list)


class Tutor(Interaction):
    """Ends the conversation after a right answer (reward 1.0) or after ``max_tries`` wrong ones (reward 0.0 each).

    The row's ``interaction_kwargs`` hold ``ground_truth``. Numbers are compared as numbers: ``1,665`` is ``1665.0``.
    """

    config: TutorConfig

    def __init__(self, config: TutorConfig, context: InteractionContext) -> None:
        super().__init__(config, context)
        self._lessons: dict[str, _Lesson] = {}

    async def start_interaction(self, instance_id: str, *, ground_truth: Any = None, **kwargs: Any) -> None:
        if ground_truth is None or not str(ground_truth).strip():
            raise ValueError(
                f"interaction {self.context.name!r}: extra_info.interaction_kwargs of the row has no ground_truth"
            )
        self._lessons[instance_id] = _Lesson(_comparable(str(ground_truth)))

    async def generate_response(
        self, instance_id: str, messages: Sequence[dict[str, Any]], **kwargs: Any
    ) -> InteractionTurn:
        lesson = self._lessons[instance_id]
        _, marker, tail = text_of(messages[-1]).rpartition(self.config.answer_marker)
        answer = _comparable(tail.split("\n", 1)[0]) if marker else None
        right = answer == lesson.ground_truth
        lesson.scores.append(float(right))
        tries_left = self.config.max_tries - len(lesson.scores)
        if right or tries_left <= 0:
            return InteractionTurn(terminate=True, text="", reward=float(right))
        message = self.config.no_answer_message if answer is None else self.config.wrong_message
        return InteractionTurn(terminate=False, text=message.replace("{tries_left}", str(tries_left)), reward=0.0)

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float | None:
        scores = self._lessons[instance_id].scores
        if not scores:
            return None
        return max(scores) if self.config.score == "best" else scores[-1]

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._lessons.pop(instance_id, None)


def _comparable(answer: str) -> str:
    """The same text for equal answers: numbers without sign of plus, currency, separators and trailing zeros."""
    answer = answer.strip()
    number = _NUMBER.fullmatch(answer.removesuffix("."))
    if number is None:
        return answer
    sign, whole, fraction = number.groups()
    whole, fraction = whole.replace(",", "").lstrip("0") or "0", (fraction or "").rstrip("0").rstrip(".")
    minus = "-" if sign == "-" and (whole != "0" or fraction) else ""
    return minus + whole + fraction
