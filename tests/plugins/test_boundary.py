"""Deadlines and failures of code that is not ours."""

import asyncio
import logging
import re
import threading
from collections.abc import Awaitable

import pytest

from agentrl_core.api import FunctionTool, ToolContext
from agentrl_core.api.errors import DeadlineError, EngineError, RewardError, ToolError
from agentrl_core.plugins import boundary as boundary_module
from agentrl_core.plugins.boundary import boundary, deadline, hang_reported, traced, with_traceback, within


def test_a_deadline_raises_its_error_and_leaves_a_timeout_of_the_block_alone() -> None:
    async def late() -> None:
        async with deadline(0.0, lambda: "judge: no answer", RewardError):
            await asyncio.Event().wait()

    async def own() -> None:
        async with deadline(60.0, "judge: no answer"):
            raise TimeoutError("the judge's own")

    with pytest.raises(RewardError, match="^judge: no answer$"):
        asyncio.run(late())
    with pytest.raises(TimeoutError, match="the judge's own"):
        asyncio.run(own())


def test_a_call_that_answers_at_once_sets_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_timer(seconds: float) -> None:
        raise AssertionError("a timer was set")

    async def at_once() -> str:
        return "here"

    async def raises() -> str:
        raise KeyError("city")

    monkeypatch.setattr(asyncio, "timeout", no_timer)
    assert asyncio.run(within(60.0, at_once(), "late")) == "here"
    with pytest.raises(KeyError, match="city"):
        asyncio.run(within(60.0, raises(), "late"))


def test_a_call_that_waits_has_a_deadline_from_its_first_wait_on() -> None:
    async def hangs() -> None:
        await asyncio.sleep(0)
        await asyncio.Event().wait()

    async def hangs_in_an_awaitable() -> None:
        await within(0.01, asyncio.get_running_loop().create_future(), "judge: no answer", RewardError)

    with pytest.raises(RewardError, match="^judge: no answer$"):
        asyncio.run(within(0.01, hangs(), lambda: "judge: no answer", RewardError))
    with pytest.raises(RewardError, match="^judge: no answer$"):
        asyncio.run(hangs_in_an_awaitable())


def test_a_call_within_a_deadline_handles_what_happens_while_it_waits() -> None:
    async def failing() -> None:
        await asyncio.sleep(0)
        raise KeyError("city")

    async def recovers(*waits: Awaitable[None]) -> list[str]:
        seen = []
        for each in waits:
            try:
                await each
            except (KeyError, asyncio.CancelledError) as error:
                seen.append(type(error).__name__)
        await asyncio.sleep(0)
        return seen

    async def cancelled(waits: int) -> list[str]:
        loop = asyncio.get_running_loop()
        call = recovers(*(loop.create_future() for _ in range(waits)))
        task = asyncio.ensure_future(within(60.0, call, "late"))
        for _ in range(waits):
            await asyncio.sleep(0)
            task.cancel()
        return await task

    async def fails() -> list[str]:
        return await within(60.0, recovers(asyncio.ensure_future(failing()), asyncio.ensure_future(failing())), "late")

    async def last() -> str:
        async def call() -> str:
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                return "cleaned up"
            return ""

        task = asyncio.ensure_future(within(60.0, call(), "late"))
        await asyncio.sleep(0)
        task.cancel()
        return await task

    assert asyncio.run(fails()) == ["KeyError", "KeyError"]
    assert asyncio.run(cancelled(2)) == ["CancelledError", "CancelledError"]
    assert asyncio.run(last()) == "cleaned up"


def test_whatever_foreign_code_raises_becomes_one_class_that_names_it() -> None:
    with (
        pytest.raises(ToolError, match=r"^tool 'x' raised KeyError: 'city'$") as caught,
        boundary(ToolError, "tool 'x' raised"),
    ):
        raise KeyError("city")
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(ToolError, match="^too late$"), boundary(ToolError, "tool 'x' raised"):
        raise DeadlineError("too late")
    for kept in (ToolError("as it is"), EngineError("as it is")):
        with pytest.raises(type(kept), match="^as it is$"), boundary(ToolError, "tool 'x' raised", keep=(EngineError,)):
            raise kept
    with pytest.raises(KeyboardInterrupt), boundary(ToolError):
        raise KeyboardInterrupt


def test_an_error_for_another_process_has_its_traceback_as_text() -> None:
    with (
        pytest.raises(EngineError, match="ValueError: no\nTraceback") as caught,
        boundary(EngineError, describe=with_traceback),
    ):
        raise ValueError("no")
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_that_text_begins_at_foreign_code() -> None:
    """Not with the frames of asyncio and of agentrl that called it."""

    def fails(text: str) -> str:
        raise ValueError("no")

    tool = FunctionTool(fails, ToolContext("fails"))
    try:
        asyncio.run(tool.execute("id", {"text": "a"}))
    except ValueError as error:
        text = with_traceback(error)
    assert "in fails" in text and "asyncio" not in text and "api/tool.py" not in text
    assert len(text.splitlines()) < 8


def test_a_tracker_that_hangs_is_in_the_log_with_the_line_where_it_stands(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boundary_module, "HANG_SECONDS", 0.01)
    reported, records = threading.Event(), []

    def seen(record: logging.LogRecord) -> bool:
        # The second report: by then the first one is in the log.
        records.append(record)
        if len(records) == 2:
            reported.set()
        return True

    monkeypatch.setattr(logging.getLogger("agentrl_core.plugins.boundary"), "filter", seen)
    with hang_reported("tracker 'board', called at step 3,"):
        assert reported.wait(60)
    said = r"tracker 'board', called at step 3, has not returned for \d+ s, and the run waits for it"
    assert re.search(said, caplog.text)
    assert "assert reported.wait(60)" in caplog.text


def test_a_hook_for_each_trajectory_starts_no_thread_for_each_call() -> None:
    with hang_reported("hook 'solved' in on_trajectory_end"):
        before = threading.active_count()
        for _ in range(3):
            with hang_reported("hook 'solved' in on_trajectory_end"):
                assert threading.active_count() == before


def test_a_bug_of_one_line_in_a_reward_is_one_short_traceback() -> None:
    def score() -> None:
        raise KeyError("city")

    with pytest.raises(RewardError) as caught:
        try:
            with boundary(RewardError, "reward function 'score' raised"):
                score()
        except RewardError as error:
            raise RewardError(str(error)) from error
    lines = traced(caught.value).splitlines()
    assert lines[0] == "Traceback (most recent call last):" and 'raise KeyError("city")' in "".join(lines)
    assert "in boundary" not in "".join(lines)
    assert lines[-2:] == ["KeyError: 'city'", "reward function 'score' raised KeyError: 'city'"]
    trace = "Traceback (most recent call last):\n  a.py"
    assert traced(RewardError(f"'score' raised ValueError: no\n{trace}\n")) == f"{trace}\n'score' raised ValueError: no"
    assert traced(EngineError("no replica is alive")) == "EngineError: no replica is alive"
