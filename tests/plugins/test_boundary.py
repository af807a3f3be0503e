"""Deadlines and failures of code that is not ours."""

import asyncio
import logging
import re
import threading

import pytest

from agentrl_core.api.errors import DeadlineError, EngineError, RewardError, ToolError
from agentrl_core.plugins import boundary as boundary_module
from agentrl_core.plugins.boundary import boundary, deadline, hang_reported, traced, with_traceback


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
