import asyncio
import gc
from collections.abc import Iterator

import pytest

from agentrl_core.rollout.pacing import COLLECTION_THRESHOLD, Pacer, fewer_collections


async def iterations(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_crowd_goes_on_in_order_and_few_at_a_time() -> None:
    async def scenario() -> list[list[int]]:
        pacer, passed, rounds = Pacer(per_iteration=3), [], []

        async def one(number: int) -> None:
            await pacer.wait()
            passed.append(number)

        tasks = [asyncio.create_task(one(number)) for number in range(10)]
        while len(passed) < len(tasks):
            before = len(passed)
            await asyncio.sleep(0)
            rounds.append(passed[before:])
        return [part for part in rounds if part]

    rounds = asyncio.run(scenario())
    assert [number for part in rounds for number in part] == list(range(10))
    assert max(map(len, rounds)) == 3


def test_who_is_alone_does_not_wait() -> None:
    async def scenario() -> None:
        pacer = Pacer()
        for _ in range(5):
            with pytest.raises(StopIteration):
                pacer.wait().send(None)
            await iterations(2)

    asyncio.run(scenario())


def test_a_cancelled_waiter_holds_nobody_up() -> None:
    async def scenario() -> list[int]:
        pacer, passed = Pacer(per_iteration=1), []

        async def one(number: int) -> None:
            await pacer.wait()
            passed.append(number)

        tasks = [asyncio.create_task(one(number)) for number in range(6)]
        await asyncio.sleep(0)
        for number in (1, 2, 4):
            tasks[number].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return passed

    assert asyncio.run(scenario()) == [0, 3, 5]


@pytest.fixture
def thresholds() -> Iterator[tuple[int, int, int]]:
    """Python's own, put back after the test."""
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)


def thresholds_inside() -> tuple[int, int, int]:
    with pytest.raises(ZeroDivisionError):
        with fewer_collections():
            inside = gc.get_threshold()
            raise ZeroDivisionError
    return inside


def test_garbage_is_collected_less_often_in_a_rollout_and_as_before_after_it(thresholds: tuple[int, int, int]) -> None:
    assert thresholds_inside() == (COLLECTION_THRESHOLD, *thresholds[1:])
    assert gc.get_threshold() == thresholds


def test_two_rollouts_at_once_leave_the_collector_as_it_was(thresholds: tuple[int, int, int]) -> None:
    first, second = fewer_collections(), fewer_collections()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold()[0] == COLLECTION_THRESHOLD
    second.__exit__(None, None, None)
    assert gc.get_threshold() == thresholds


@pytest.mark.parametrize("own", [(0, 10, 10), (100_000, 5, 5)])
def test_a_user_who_chose_rarer_collections_keeps_them(thresholds: object, own: tuple[int, int, int]) -> None:
    gc.set_threshold(*own)
    assert thresholds_inside() == own
