"""Options of the interactions."""

from dataclasses import dataclass
from typing import Literal

from agentrl_core.api import option


@dataclass
class TutorConfig:
    max_tries: int = option(2, ge=1, unit="answers", help="answers that the policy may give, the first one included")
    answer_marker: str = option("####", help="the answer is what follows its last occurrence, up to the line's end")
    wrong_message: str = option(
        "That is not correct. Please try again.", help="after a wrong answer; {tries_left} is replaced"
    )
    no_answer_message: str = option(
        "I cannot find your answer. Please write it after ####.",
        help="after a turn without the marker; {tries_left} is replaced",
    )
    score: Literal["best", "last"] = option("best", help="which answer's score is that of the conversation")
