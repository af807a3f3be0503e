import pytest

from agentrl_core.api import RewardFunctionContext, RewardTrajectory
from agentrl_rewards_math.function import Math
from agentrl_rewards_math.plugin import PLUGIN, MathConfig
from agentrl_testing.contracts import RewardFunctionCase, RewardFunctionContract


def answer(text: str, truth: object = "1/2") -> RewardTrajectory:
    return RewardTrajectory([], text, text, text, ground_truth=truth, extra_info={"index": 7})


class TestMath(RewardFunctionContract):
    @pytest.fixture
    def plugin(self) -> RewardFunctionCase:
        return RewardFunctionCase(PLUGIN, trajectories=[(answer("\\boxed{0.5}"), 1.0), (answer("no idea"), 0.0)])


@pytest.fixture
def math() -> Math:
    return Math(MathConfig(), RewardFunctionContext("math"))


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("It is $\\frac{1}{2}$.", "1/2", 1.0),
        ("so x is 0.5", "\\frac{1}{2}", 1.0),
        ("\\boxed{\\frac{2}{4}}", "$\\frac12$", 1.0),
        ("\\boxed{1,665}", 1665, 1.0),
        ("\\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        ("\\boxed{\\{2, 1\\}}", "\\{1,2\\}", 1.0),
        ("\\boxed{5}", "\\boxed{5}", 1.0),
        ("\\boxed{0.51}", "1/2", 0.0),
        ("\\boxed{-5}", "5", 0.0),
        ("\\boxed{1} or \\boxed{2}", "1", 0.0),
        ("\\frac{1}{", "1/3", 0.0),
        ("", "1", 0.0),
    ],
)
def test_scores(math: Math, text: str, truth: object, score: float) -> None:
    assert math(answer(text, truth)).score == score


@pytest.mark.parametrize(
    ("text", "score"), [("\\boxed{1} no, \\boxed{\\frac{1}{2}}", 1.0), ("0.5", 0.0), ("0.5 \\boxed{", 0.0)]
)
def test_only_the_last_box_counts(text: str, score: float) -> None:
    assert Math(MathConfig(boxed=True), RewardFunctionContext("math"))(answer(text)).score == score


def test_right_answers_are_one_vote(math: Math) -> None:
    texts = ["\\boxed{0.5}", "\\boxed{\\frac12}", "$2/4$", "\\boxed{3}", "none"]
    assert [math(answer(text)).answer for text in texts] == ["1/2", "1/2", "1/2", "3", ""]


@pytest.mark.parametrize(("truth", "problem"), [(None, "is missing"), (" ", "is missing"), ("$", "is ")])
def test_a_bad_ground_truth_names_the_row(math: Math, truth: object, problem: str) -> None:
    with pytest.raises(ValueError, match=f"ground_truth of row 7 {problem}"):
        math(answer("1", truth))
