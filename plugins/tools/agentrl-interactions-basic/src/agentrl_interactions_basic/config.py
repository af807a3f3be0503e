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


@dataclass
class SimulatedUserConfig:
    engine: str = option(help="name of the user's engine in `engines`")
    instructions: str = option(help="who the user is and wants; {field} is replaced by that of interaction_kwargs")
    done: str = option("[DONE]", help="what the user writes to end the conversation; the instructions should say so")
    max_replies: int = option(5, ge=0, unit="messages", help="most replies of the user; then the conversation ends")
    retries: int = option(2, ge=0, help="further answers that the engine may give after an empty one")
    temperature: float = option(1.0, ge=0, le=2, help="of the user's replies; 0: greedy")
    max_tokens: int = option(256, ge=1, unit="tokens", help="maximum length of a reply")
