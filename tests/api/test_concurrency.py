"""Calls that end together."""

import asyncio

import pytest

from agentrl_core.api import together


class Failed(Exception):
    pass


async def number(value: int) -> int:
    for _ in range(3 - value):
        await asyncio.sleep(0)
    return value


def test_results_are_in_the_order_of_the_calls() -> None:
    async def scenario() -> None:
        assert await together(map(number, range(3))) == [0, 1, 2]
        assert await together(()) == []

    asyncio.run(scenario())


@pytest.mark.parametrize("cancel", [False, True])
def test_the_others_have_ended_when_one_fails_or_the_whole_is_cancelled(cancel: bool) -> None:
    ended: list[str] = []

    async def waits(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(name)

    async def fails() -> None:
        await asyncio.sleep(0)
        try:
            raise ValueError("the cause")
        except ValueError as error:
            raise Failed("first") from error

    async def scenario() -> None:
        task = asyncio.ensure_future(together([waits("a"), *([] if cancel else [fails()]), waits("b")]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if cancel:
            task.cancel()
        with pytest.raises(asyncio.CancelledError if cancel else Failed) as caught:
            await task
        assert sorted(ended) == ["a", "b"]
        if not cancel:
            assert str(caught.value.__cause__) == "the cause", "the exception comes as it was raised"

    asyncio.run(scenario())
