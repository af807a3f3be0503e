import asyncio
from typing import Any

import pytest

from agentrl_core.api import InteractionContext, InteractionTurn
from agentrl_interactions_basic.config import TutorConfig
from agentrl_interactions_basic.tutor import Tutor


def tutor(**config: Any) -> Tutor:
    return Tutor(TutorConfig(**config), InteractionContext("tutor"))


def lesson(instance: Tutor, *answers: Any, truth: Any = "1665") -> tuple[list[InteractionTurn], float | None]:
    async def play() -> tuple[list[InteractionTurn], float | None]:
        await instance.start_interaction("one", ground_truth=truth)
        turns = [await instance.generate_response("one", [{"role": "assistant", "content": a}]) for a in answers]
        score = await instance.calculate_score("one")
        await instance.finalize_interaction("one")
        return turns, score

    return asyncio.run(play())


def test_right_answer_ends_the_conversation() -> None:
    assert lesson(tutor(), "so #### 1665") == ([InteractionTurn(True, "", 1.0)], 1.0)


def test_wrong_answer_gets_another_try() -> None:
    turns, score = lesson(tutor(), "#### 5", "#### 1665")
    assert turns == [
        InteractionTurn(False, "That is not correct. Please try again.", 0.0),
        InteractionTurn(True, "", 1.0),
    ]
    assert score == 1.0


def test_tries_are_limited() -> None:
    turns, score = lesson(tutor(max_tries=3), "#### 1", "#### 2", "#### 3")
    assert [turn.terminate for turn in turns] == [False, False, True]
    assert [turn.reward for turn in turns] == [0.0, 0.0, 0.0]
    assert score == 0.0


def test_messages_are_configurable() -> None:
    wrong = tutor(max_tries=3, wrong_message="{no} {tries_left} left", no_answer_message="where? {tries_left}")
    assert [turn.text for turn in lesson(wrong, "#### 1", "1665")[0]] == ["{no} 2 left", "where? 1"]


def test_score_best_or_last() -> None:
    answers = ("#### 1665", "#### 1")
    assert lesson(tutor(max_tries=5, score="best"), *answers)[1] == 1.0
    assert lesson(tutor(max_tries=5, score="last"), *answers)[1] == 0.0
    assert lesson(tutor())[1] is None


@pytest.mark.parametrize("answer", ["1,665", "$1665", "1665.0", "1665.", "01665", " 1665 \nand so on", "+1665"])
@pytest.mark.parametrize("truth", ["1665", 1665, 1665.0])
def test_numbers_are_compared_as_numbers(answer: str, truth: Any) -> None:
    assert lesson(tutor(), f"#### {answer}", truth=truth)[1] == 1.0


@pytest.mark.parametrize("answer", ["-1665", "1665 or 7", "16.65", "1665x", "1,66,5", ""])
def test_other_answers_are_wrong(answer: str) -> None:
    assert lesson(tutor(), f"#### {answer}")[1] == 0.0


def test_long_numbers_keep_every_digit_and_minus_zero_is_zero() -> None:
    assert lesson(tutor(), "#### " + "1" * 40, truth="1" * 39 + "2")[1] == 0.0
    assert lesson(tutor(), "#### -0.0", truth="0")[1] == 1.0


def test_text_answers_and_content_parts() -> None:
    assert lesson(tutor(), "#### New York", truth="New York")[1] == 1.0
    assert lesson(tutor(), [{"type": "text", "text": "#### 1665"}])[1] == 1.0
    assert lesson(tutor(), None)[1] == 0.0


@pytest.mark.parametrize("kwargs", [{}, {"ground_truth": None}, {"ground_truth": " "}])
def test_missing_ground_truth_names_the_key(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="'tutor': extra_info.interaction_kwargs of the row has no ground_truth"):
        asyncio.run(tutor().start_interaction("one", **kwargs))


def test_conversations_are_kept_apart_and_forgotten() -> None:
    instance = tutor()

    async def play() -> list[float | None]:
        for name, truth in (("a", 1), ("b", 2)):
            await instance.start_interaction(name, ground_truth=truth)
        messages = [{"role": "assistant", "content": "#### 2"}]
        scores = [(await instance.generate_response(name, messages)).reward for name in "ab"]
        for name in "ab":
            await instance.finalize_interaction(name)
            await instance.finalize_interaction(name)
        return scores

    assert asyncio.run(play()) == [0.0, 1.0]
    with pytest.raises(KeyError):
        asyncio.run(instance.calculate_score("a"))
