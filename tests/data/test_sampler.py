"""Which prompts a step trains on."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from agentrl_core.data.sampler import PromptSampler, fingerprint

SIZES = st.integers(1, 30)


@given(size=SIZES, batch=SIZES, seed=st.integers(0, 2**31), shuffle=st.booleans(), steps=st.integers(1, 8))
def test_a_resumed_sampler_goes_on_where_the_other_stopped(size, batch, seed, shuffle, steps) -> None:
    """No state: any step can be asked first, and again."""
    whole = PromptSampler(size, batch, seed, shuffle)
    batches = [whole.batch(step) for step in range(1, steps + 1)]
    assert PromptSampler(size, batch, seed, shuffle).batch(steps) == batches[-1]
    assert whole.batch(1) == batches[0]


@given(size=SIZES, batch=SIZES, seed=st.integers(0, 99))
def test_every_epoch_has_every_row_once_also_where_the_dataset_is_smaller_than_a_batch(size, batch, seed) -> None:
    sampler = PromptSampler(size, batch, seed, shuffle=True)
    stream = [row for step in range(1, 3 * size + 1) for row in sampler.batch(step)]
    assert all(len(sampler.batch(step)) == batch for step in (1, 2))
    for start in range(0, len(stream) - size + 1, size):
        assert Counter(stream[start : start + size]) == Counter(range(size))


def test_without_shuffle_rows_come_in_order() -> None:
    sampler = PromptSampler(5, 3, seed=1, shuffle=False)
    assert [sampler.batch(step) for step in (1, 2, 3)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    first = PromptSampler(50, 50, seed=1, shuffle=True)
    assert len({tuple(first.batch(1)), tuple(first.batch(2)), tuple(PromptSampler(50, 50, 2, True).batch(1))}) == 3


def test_a_fingerprint_notices_other_prompts_and_another_order() -> None:
    a, b = ({"raw_prompt": [{"role": "user", "content": text}]} for text in "ab")
    assert fingerprint([a, b]) == fingerprint([a, b])
    assert len({fingerprint([a, b]), fingerprint([b, a]), fingerprint([a]), fingerprint([])}) == 4
