import asyncio

import pytest

from agentrl_core.rollout.pacing import Pacer


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
