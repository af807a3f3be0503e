import asyncio
from typing import Any

import pytest

from agentrl_core.api import ConfigError, Engines, RewardError, RewardFunctionContext, RewardResult, RewardTrajectory
from agentrl_rewards_judge.config import JudgeConfig
from agentrl_rewards_judge.judge import Judge

MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "2 + {answer}?"}]},
    {"role": "assistant", "content": "so"},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "four"},
]
TRAJECTORY = RewardTrajectory(MESSAGES, "so four", "four", "so 4 four", ground_truth=4)


class Says:
    """An engine that says these, one after the other."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []

    async def chat(self, messages: Any, **sampling: Any) -> str:
        self.asked.append({"messages": messages, **sampling})
        return self.answers.pop(0)


def judge(says: Says, /, **config: Any) -> RewardResult:
    options = JudgeConfig(**{"engine": "judge", "template": "{answer}", "retries": 0, **config})
    function = Judge(options, RewardFunctionContext("judge", Engines({"judge": says})))
    return asyncio.run(function(TRAJECTORY))


@pytest.mark.parametrize(
    ("score", "scale", "said", "expected"),
    [
        ("number", None, "first 3, then -2.5.", -2.5),
        ("number", [0, 10], "I give it 8/10", 0.8),
        ("number", [1, 5], "It has 2 faults: 5", 1.0),
        ("yes_no", None, "No error is there. YES", 1.0),
        ("yes_no", None, "Nobody says yes, so: no.", 0.0),
        (r"<score>(.*?)</score>", [0, 4], "<score> 1 </score> of 4", 0.25),
        (r"verdict: (\w+)", None, "Verdict: yes, though no", 1.0),
    ],
)
def test_the_last_verdict_counts(score: str, scale: list[float] | None, said: str, expected: float) -> None:
    assert judge(Says(said), score=score, scale=scale).score == expected


@pytest.mark.parametrize(
    ("score", "scale", "said"),
    [
        ("number", None, "good"),
        ("number", [0, 10], "11"),
        ("number", None, "1" * 400),
        ("yes_no", None, "nobody knows yesterday"),
        (r"score: (\w+)", None, "score: high"),
    ],
)
def test_an_answer_without_a_verdict_is_no_score(score: str, scale: list[float] | None, said: str) -> None:
    with pytest.raises(RewardError, match=f"'judge' gave no verdict .* in 1 answers. The last one: '{said}'"):
        judge(Says(said), score=score, scale=scale)


def test_nonsense_is_asked_again_and_not_greedily() -> None:
    engine = Says("well", "hm", "7")
    assert judge(engine, retries=2, max_tokens=9) == RewardResult(7.0, metrics={"retries": 2.0})
    assert [each["temperature"] for each in engine.asked] == [0.0, 1.0, 1.0]
    assert {each["max_tokens"] for each in engine.asked} == {9}


def test_a_judge_reads_that_there_is_an_image() -> None:
    content = [{"type": "text", "text": "what is"}, {"type": "image", "image": "0" * 32 + "-4x3.png"}]
    engine = Says("1")
    function = Judge(
        JudgeConfig(engine="judge", template="{question}|{conversation}"),
        RewardFunctionContext("judge", Engines({"judge": engine})),
    )
    asyncio.run(function(RewardTrajectory([{"role": "user", "content": content}], "", "", "")))
    assert engine.asked[0]["messages"][-1]["content"] == "what is<image>|user: what is<image>"


def test_the_template_is_filled_once_and_other_braces_stay() -> None:
    engine = Says("1")
    judge(engine, template='{question}|{answer}|{ground_truth}|{"score": 1}|{conversation}')
    conversation = "system: be brief\n\nuser: 2 + {answer}?\n\nassistant: so\n\ntool: 4\n\nassistant: four"
    content = f'2 + {{answer}}?|four|4|{{"score": 1}}|{conversation}'
    assert engine.asked[0]["messages"] == [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"template": "{anwser}"}, r"fields \{anwser\}; allowed are \{question\}, \{answer\}"),
        ({"template": "good?"}, "fields none; allowed"),
        ({"score": "(a"}, "'\\(a' is not a regular expression"),
        ({"score": "grade"}, "expression with a \\(group\\), found 'grade'"),
        ({"scale": [1, 1]}, r"expected \[lowest, highest\], found \[1, 1\]"),
        ({"engine": "jugde"}, "asks for the engine 'jugde', but `engines` has judge; name one"),
    ],
)
def test_wrong_options_are_refused_before_the_run(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        judge(Says(), **config)
