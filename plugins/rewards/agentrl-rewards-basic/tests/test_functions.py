from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_core.api import NoConfig, RewardFunctionContext, RewardTrajectory
from agentrl_rewards_basic.config import HashAnswerConfig
from agentrl_rewards_basic.functions import ExactNumber, HashAnswer


def trajectory(last_text: str, ground_truth: Any = "1665", **fields: Any) -> RewardTrajectory:
    texts = {"model_text": last_text, "full_text": last_text} | fields
    return RewardTrajectory(messages=[], last_text=last_text, ground_truth=ground_truth, **texts)


def hash_answer(last_text: str, ground_truth: Any = "1665", format_score: float = 0.0, **fields: Any) -> float:
    function = HashAnswer(HashAnswerConfig(format_score), RewardFunctionContext("hash_answer"))
    return function(trajectory(last_text, ground_truth, **fields)).score


def exact_number(last_text: str, ground_truth: Any = "1665", **fields: Any) -> float:
    function = ExactNumber(NoConfig(), RewardFunctionContext("exact_number"))
    return function(trajectory(last_text, ground_truth, **fields)).score


@pytest.mark.parametrize(
    "text", ["#### 1665", "so\n####1665\nok", "#### 7 #### 1,665", "#### $1665.00", "#### 1665.", "#### +1665"]
)
def test_hash_answer_is_right(text: str) -> None:
    assert hash_answer(text) == 1.0


@pytest.mark.parametrize("text", ["#### 1665 #### 7", "#### 1665 or 7", "#### -1665", "#### 1665x", "#### 16,65"])
def test_hash_answer_is_wrong(text: str) -> None:
    assert hash_answer(text) == 0.0
    assert hash_answer(text, format_score=0.1) == 0.1


@pytest.mark.parametrize("text", ["", "1665", "### 1665", "####", "#### \n1665"])
def test_no_hash_answer_earns_no_format_score(text: str) -> None:
    assert hash_answer(text, format_score=0.1) == 0.0


@pytest.mark.parametrize("truth", [1665, 1665.0, "1665.0", "$1,665"])
def test_ground_truth_in_other_forms(truth: Any) -> None:
    assert hash_answer("#### 1665", truth) == 1.0
    assert exact_number("It is 1665.", truth) == 1.0


@pytest.mark.parametrize(
    ("text", "answer"), [("#### 1,665.00", "1665"), ("#### 1665", "1665"), ("#### New York", "New York"), ("none", "")]
)
def test_equal_answers_are_reported_as_equal_texts(text: str, answer: str) -> None:
    function = HashAnswer(HashAnswerConfig(), RewardFunctionContext("hash_answer"))
    assert function(trajectory(text)).answer == answer


def test_hash_answer_compares_other_answers_as_text() -> None:
    assert hash_answer("#### New York", "New York") == 1.0
    assert hash_answer("#### York", "New York") == 0.0


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("37 * 45 = 1,665!", "1665"),
        ("it is -8", "-8"),
        ("12-3", "3"),
        ("(-$5.50)", "-5.5"),
        ("$-5", "-5"),
        ("about .5", "0.5"),
        ("1,2345", "2345"),
        ("version 2 of 1665.", "1665"),
    ],
)
def test_exact_number_reads_the_last_number(text: str, truth: str) -> None:
    assert exact_number(text, truth) == 1.0


@pytest.mark.parametrize("text", ["", "none", "1665 or 7", "-1665", "1665.5"])
def test_exact_number_is_wrong(text: str) -> None:
    assert exact_number(text) == 0.0


@pytest.mark.parametrize("function", [hash_answer, exact_number])
def test_reward_ignores_tool_output(function: Any) -> None:
    """The tool printed the right answer, in the right form; the policy did not."""
    messages = [{"role": "tool", "content": "#### 1665"}]
    assert function("I do not know", model_text="I do not know", full_text=f"{messages} I do not know") == 0.0


@pytest.mark.parametrize("function", [hash_answer, exact_number])
@pytest.mark.parametrize("truth", [None, "", "  "])
def test_row_without_ground_truth_is_named(function: Any, truth: Any) -> None:
    with pytest.raises(ValueError, match="row 17 of 'sums' has no reward_model.ground_truth"):
        function("#### 1", truth, extra_info={"index": 17}, data_source="sums")
    with pytest.raises(ValueError, match="without extra_info.index"):
        function("#### 1", truth)


def test_exact_number_needs_a_number_as_ground_truth() -> None:
    with pytest.raises(ValueError, match="the ground truth of row 3 is 'Paris', which is not a number"):
        exact_number("1", "Paris", extra_info={"index": 3})


@settings(deadline=None)
@given(st.integers() | st.decimals(allow_nan=False, allow_infinity=False, places=3))
def test_every_number_equals_itself(number: Any) -> None:
    for form in (f"{number}", f"{number:,}"):
        assert hash_answer(f"#### {form}", str(number)) == 1.0
        assert exact_number(f"The answer is {form}.", str(number)) == 1.0


@settings(deadline=None)
@given(st.text())
def test_any_text_is_scored(text: str) -> None:
    assert hash_answer(text) in (0.0, 1.0)
    assert exact_number(text) in (0.0, 1.0)
