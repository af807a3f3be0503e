"""Calls that run concurrently and end together: ``await together(session.call_tool(call) for call in calls)``.

Where one fails, ``asyncio.gather`` leaves the others running: they would use tools and engines of a trajectory that has
been released.
"""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run calls concurrently and return their results in order.

    When one raises, or this call is cancelled, the others are cancelled; all have ended when this returns.

    Raises:
        Exception: the first that a call raised, unchanged.
    """
    failure: BaseException | None = None
    tasks: list[asyncio.Task[T]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks += [group.create_task(call) for call in calls]
    except BaseExceptionGroup as group_of_failures:
        failure = group_of_failures.exceptions[0]
    # Raised out here, so that its own cause and context stay.
    if failure is not None:
        raise failure
    return [task.result() for task in tasks]
