"""Which prompts a step trains on."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl_core.api import DataError, NoConfig, PromptOutcome, SamplerContext
from agentrl_dataset_prompts.config import CurriculumConfig, MixtureConfig
from agentrl_dataset_prompts.samplers import Curriculum, Mixture, Sequential, Shuffle

SIZES = st.integers(1, 30)


def rows(**counts: int) -> list[dict[str, Any]]:
    return [{"raw_prompt": [], "data_source": source} for source, count in counts.items() for _ in range(count)]


def context(size: int, batch_size: int, seed: int = 0) -> SamplerContext:
    return SamplerContext(rows(a=size), batch_size, seed)


@given(size=SIZES, batch=SIZES, seed=st.integers(0, 99))
def test_every_epoch_has_every_row_once_also_where_the_dataset_is_smaller_than_a_batch(
    size: int, batch: int, seed: int
) -> None:
    sampler = Shuffle(NoConfig(), context(size, batch, seed))
    stream = [row for step in range(1, 3 * size + 1) for row in sampler.batch(step)]
    for start in range(0, len(stream) - size + 1, size):
        assert Counter(stream[start : start + size]) == Counter(range(size))


@given(size=SIZES, batch=SIZES, seed=st.integers(0, 2**31), steps=st.integers(1, 8))
def test_steps_can_be_asked_for_in_any_order(size: int, batch: int, seed: int, steps: int) -> None:
    whole = Shuffle(NoConfig(), context(size, batch, seed))
    batches = [whole.batch(step) for step in range(1, steps + 1)]
    assert Shuffle(NoConfig(), context(size, batch, seed)).batch(steps) == batches[-1]
    assert whole.batch(1) == batches[0]


def test_sequential_keeps_the_order_of_the_files() -> None:
    sampler = Sequential(NoConfig(), context(5, 3))
    assert [sampler.batch(step) for step in (1, 2, 3)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


def test_epochs_and_seeds_have_different_orders() -> None:
    first, second = (Shuffle(NoConfig(), context(50, 50, seed)) for seed in (1, 2))
    assert len({tuple(first.batch(1)), tuple(first.batch(2)), tuple(second.batch(1))}) == 3


@given(batch=st.integers(1, 20), seed=st.integers(0, 99))
def test_every_batch_of_a_mixture_has_the_shares_up_to_one_prompt(batch: int, seed: int) -> None:
    data = rows(gsm8k=5, math=40, other=3)
    sampler = Mixture(MixtureConfig({"gsm8k": 0.7, "math": 0.3, "other": 0}), SamplerContext(data, batch, seed))
    drawn: Counter[int] = Counter()
    for step in range(1, 41):
        numbers = sampler.batch(step)
        of_gsm8k = sum(data[number]["data_source"] == "gsm8k" for number in numbers)
        assert abs(of_gsm8k - 0.7 * batch) < 1
        assert not any(data[number]["data_source"] == "other" for number in numbers)
        drawn.update(numbers)
    # The rows of a source come in turn.
    counts = [drawn[number] for number in range(5)]
    assert max(counts) - min(counts) <= 1


def test_shares_of_a_mixture_are_exact_over_many_steps() -> None:
    data = rows(a=10, b=10)
    sampler = Mixture(MixtureConfig({"a": 9, "b": 1}), SamplerContext(data, 3, 0))
    numbers = [number for step in range(1, 2001) for number in sampler.batch(step)]
    assert sum(number >= 10 for number in numbers) / len(numbers) == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 1.0, "math": 1.0}, r"no training row has the data_source math; there are a \(2 rows\), b \(1 rows\)"),
        ({"a": 1.0}, "no weight for b; give each source one, 0 to leave it out"),
        ({"a": 0.0, "b": 0.0}, "at least one above 0"),
        ({"a": 2.0, "b": -1.0}, "allowed are numbers from 0 on"),
    ],
)
def test_a_mixture_that_does_not_fit_the_data_is_refused(weights: dict[str, float], message: str) -> None:
    with pytest.raises(DataError, match=rf"data.sampler.config.weights: .*{message}"):
        Mixture(MixtureConfig(weights), SamplerContext(rows(a=2, b=1), 2, 0))


def test_a_curriculum_draws_prompts_near_the_target() -> None:
    """Rows 0 to 9 always fail, 10 to 19 succeed half of the time, 20 to 29 always succeed."""
    sampler = Curriculum(CurriculumConfig(), context(30, 10))
    drawn: Counter[int] = Counter()
    for step in range(1, 61):
        numbers = sampler.batch(step)
        assert len(set(numbers)) == 10
        if step > 20:
            drawn.update(number // 10 for number in numbers)
        sampler.update(step, [PromptOutcome(number, [[0, 0], [0, 1], [1, 1]][number // 10]) for number in numbers])
    assert drawn[1] > 2 * (drawn[0] + drawn[2]) > 0


def test_recent_rewards_count_most_and_prompts_without_rewards_keep_their_mean() -> None:
    sampler = Curriculum(CurriculumConfig(), context(2, 1))
    for step, rewards in enumerate([[0.0, 1.0], [1.0, 1.0], []], start=1):
        sampler.update(step, [PromptOutcome(1, rewards)])
    assert sampler.state_dict() == {"means": {"1": 0.75}}


def test_rewards_are_scaled_by_their_declared_range() -> None:
    sampler = Curriculum(CurriculumConfig(), SamplerContext(rows(a=2), 1, 0, reward_range=(-10.0, 10.0)))
    sampler.update(1, [PromptOutcome(0, [-10.0, 10.0]), PromptOutcome(1, [5.0])])
    assert sampler.state_dict() == {"means": {"0": 0.5, "1": 0.75}}


def test_rewards_outside_of_the_range_count_as_its_end_and_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    sampler = Curriculum(CurriculumConfig(), context(2, 1))
    sampler.update(1, [PromptOutcome(0, [-3.0]), PromptOutcome(1, [8.0])])
    assert sampler.state_dict() == {"means": {"0": 0.0, "1": 1.0}}
    assert [record.message for record in caplog.records] == [
        "data.sampler=curriculum: a mean reward of -3 is outside of 0..1 and counts as the nearest end. Declare "
        "reward.functions[].range"
    ]
