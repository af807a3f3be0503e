"""What a validation reports for several answers per prompt, against enumeration and published examples."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_core.api import RewardResult, RewardTrajectory, Termination
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.trainer.sample_statistics import best_at_k, group_sizes, maj_at_k, pass_at_k
from agentrl_core.trainer.validation import validation_metrics


def result(uid: str, score: float | None, text: str = "", answer: str | None = None) -> TrajectoryResult:
    seen = RewardTrajectory(messages=[], model_text=text, last_text=text, full_text=text)
    reward = None if score is None else RewardResult(score, answer=answer)
    return TrajectoryResult({"uid": uid, "data_source": "s"}, "t", Termination.COMPLETED, [], reward, seen)


def sampled(*results: TrajectoryResult) -> dict[str, float]:
    metrics = validation_metrics({"sampled": results}, correct_above=0.5)
    return {name.removeprefix("validation/s/"): value for name, value in metrics.items()}


def test_the_components_of_the_reward_are_averaged_over_the_trajectories_that_have_them() -> None:
    parts = [{"math": 1.0, "format": 0.5}, {"math": 0.0}]
    results = [replace(result("a", 1.0), reward=RewardResult(1.0, components=each)) for each in parts]
    metrics = sampled(*results, result("b", None))
    assert (metrics["reward/math_sampled"], metrics["reward/format_sampled"]) == (0.5, 0.5)


@given(scores=st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=2, max_size=7), data=st.data())
def test_pass_and_best_are_means_over_all_subsets(scores: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(scores)))
    subsets = list(combinations(scores, k))
    correct = [score == 1.0 for score in scores]
    assert pass_at_k(correct, k) == pytest.approx(np.mean([1.0 in subset for subset in subsets]))
    assert best_at_k(scores, k) == pytest.approx(np.mean([max(subset) for subset in subsets]))


def test_pass_at_k_of_chen_et_al_does_not_underflow() -> None:
    """1 - prod over i = n-c+1 … n of (1 - k / i), the stable form that the paper gives."""
    n, c, k = 200, 7, 100
    stable = 1 - np.prod([1 - k / i for i in range(n - c + 1, n + 1)])
    assert pass_at_k([True] * c + [False] * (n - c), k) == pytest.approx(stable, rel=1e-12)


def test_a_majority_can_be_wrong_although_one_answer_is_right() -> None:
    answers, correct = ["4", "5", "5", "6"], [True, False, False, False]
    # All four: 5 wins. Pairs: 4-5 and 4-6 tie (3 pairs with 4: half each), the other 3 are wrong.
    assert maj_at_k(answers, correct, 4) == 0.0
    assert maj_at_k(answers, correct, 2) == pytest.approx(3 * 0.5 / 6)


def test_many_subsets_are_drawn_the_same_way_each_time() -> None:
    answers, correct = ["a"] * 11 + ["b"] * 9, [True] * 11 + [False] * 9
    value = maj_at_k(answers, correct, 8)
    assert value == maj_at_k(answers, correct, 8) and 0.5 < value < 0.8
    assert maj_at_k(answers, correct, 20) == 1.0


def test_k_are_the_powers_of_two_and_n() -> None:
    assert [group_sizes(n) for n in (0, 1, 2, 6, 8)] == [[], [], [2], [2, 4, 6], [2, 4, 8]]


def test_reported_answers_vote_and_texts_vote_where_there_are_none() -> None:
    answers = [(1.0, "4"), (1.0, "4"), (0.0, "5")]
    reported = [result("p", score, f"text {n}", answer) for n, (score, answer) in enumerate(answers)]
    assert sampled(*reported)["maj_at_3"] == 1.0
    texts = [result("p", score, text) for score, text in [(1.0, "four "), (0.0, "five"), (0.0, "five")]]
    assert sampled(*texts)["maj_at_3"] == 0.0


def test_standard_error_is_that_of_resampled_prompts() -> None:
    prompts = {"a": [1, 1], "b": [0, 0], "c": [1, 0], "d": [0, 0], "e": [1, 1]}
    metrics = sampled(*(result(uid, float(score)) for uid, scores in prompts.items() for score in scores))
    assert metrics["pass_at_2"] == pytest.approx(0.6)
    random = np.random.default_rng(0)
    means = [np.mean(random.choice([1, 0, 1, 0, 1], 5)) for _ in range(20_000)]
    assert metrics["pass_at_2_stderr"] == pytest.approx(np.std(means), rel=0.02)


def test_an_answer_without_a_score_is_not_correct_and_no_score() -> None:
    metrics = sampled(result("a", 1.0), result("a", None), result("b", 0.2), result("b", 0.4))
    assert metrics["accuracy_sampled"] == 0.25 and metrics["unscored_sampled"] == 0.25
    assert metrics["pass_at_2"] == 0.5
    assert metrics["best_at_2"] == 0.4, "prompt a has only one score"


def test_one_answer_per_prompt_has_no_k() -> None:
    assert sampled(result("a", 1.0), result("b", 0.0)).keys() == {"accuracy_sampled", "score_mean_sampled"}
