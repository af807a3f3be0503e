import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from agentrl_core.api import (
    AgentLoopContext,
    AgentLoopOutput,
    EngineError,
    InteractionTurn,
    Message,
    Termination,
    ToolCall,
    ToolUnavailableError,
    Turn,
)
from agentrl_loop_tool_agent.config import ToolAgentConfig
from agentrl_loop_tool_agent.loop import ToolAgentLoop
from agentrl_testing.loops import FakeSession

PROMPT = [{"role": "system", "content": "Use tools."}, {"role": "user", "content": "What is 2 + 2?"}]


def says(content: str, *calls: ToolCall, errors: Sequence[str] = (), finish: Any = "stop") -> Turn:
    return Turn([7, 8], content, finish, content, calls, errors)


def add(a: int, b: int) -> ToolCall:
    return ToolCall("add", {"a": a, "b": b}, id=f"call-{a}-{b}")


def run(session: FakeSession, **config: Any) -> AgentLoopOutput:
    context = AgentLoopContext(session.renderer, None, tuple(session.tools), (), session.budget)
    loop = ToolAgentLoop(ToolAgentConfig(**config), context)
    output = asyncio.run(loop.run({"temperature": 0.5}, session=session, raw_prompt=PROMPT, extra_info={}))
    assert isinstance(output, AgentLoopOutput)
    assert len(output.response_ids) == len(output.response_mask)
    return output


def session_of(*turns: Turn, **kwargs: Any) -> FakeSession:
    return FakeSession(turns, tools={"add": lambda a, b: a + b}, **kwargs)


def contents(session: FakeSession) -> list[list[str]]:
    return [[m["content"] for m in batch] for batch in session.trajectories[0].added]


def test_answer_without_a_call_completes() -> None:
    session = session_of(says("4"))
    output = run(session)
    assert (output.termination, output.response_mask) == (Termination.COMPLETED, [1, 1])
    assert session.trajectories[0].sampling_params == [{"temperature": 0.5}]


def test_tool_schemas_are_rendered_into_the_prompt() -> None:
    session = session_of(says("4"))
    assert "<schema add>" in session.renderer.decode(run(session).prompt_ids)


def test_call_then_answer() -> None:
    session = session_of(says("let me see", add(2, 2)), says("4"))
    output = run(session)
    assert output.termination is Termination.COMPLETED
    assert contents(session) == [["4"]]
    assert output.response_mask == [1, 1, 0, 0, 0, 0, 1, 1]


def test_num_turns_counts_messages_without_the_system_prompt() -> None:
    assert run(session_of(says("", add(2, 2), add(3, 3)), says("4"))).num_turns == 5


def test_tool_messages_once_each_in_call_order() -> None:
    """The slowest call comes first; an unparsable call comes last; all of them arrive in one piece."""
    second_done = asyncio.Event()

    async def first() -> str:
        await second_done.wait()
        return "first"

    async def second() -> str:
        second_done.set()
        return "second"

    session = FakeSession(
        [says("", ToolCall("first", {}), ToolCall("second", {}), errors=["Error: not JSON"]), says("done")],
        tools={"first": first, "second": second},
    )
    output = run(session)
    assert contents(session) == [["first", "second", "Error: not JSON"]]
    assert [m["content"] for m in output.messages if m["role"] == "tool"] == ["first", "second", "Error: not JSON"]


def test_unknown_tool_is_an_observation() -> None:
    session = session_of(says("", ToolCall("divide", {})), says("I give up"))
    output = run(session)
    assert output.termination is Termination.COMPLETED
    assert contents(session) == [["Error: there is no tool 'divide'; available: add"]]


@pytest.mark.parametrize("error", [ToolUnavailableError("no sandbox"), EngineError("the judge is gone")])
def test_what_is_not_the_models_fault_ends_all_calls_of_the_turn(error: Exception) -> None:
    """The world is released next: a call that goes on would use what is gone."""
    events: list[str] = []

    async def slow() -> str:
        events.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            events.append("ended")
        return ""

    async def unavailable() -> str:
        while "begun" not in events:
            await asyncio.sleep(0)
        raise error

    calls = says("", ToolCall("slow", {}), ToolCall("unavailable", {}), ToolCall("slow", {}))
    session = FakeSession([calls, says("never")], tools={"slow": slow, "unavailable": unavailable})
    context = AgentLoopContext(session.renderer, None, tuple(session.tools), (), session.budget)

    async def scenario() -> None:
        with pytest.raises(type(error), match=str(error)):
            await ToolAgentLoop(ToolAgentConfig(), context).run({}, session=session, raw_prompt=PROMPT, extra_info={})
        assert events == ["begun", "begun", "ended", "ended"]

    asyncio.run(scenario())


def test_tool_that_raises_is_an_observation() -> None:
    def broken() -> None:
        raise ValueError("out of order")

    session = FakeSession([says("", ToolCall("broken", {})), says("ok")], tools={"broken": broken})
    assert run(session).termination is Termination.COMPLETED
    assert contents(session) == [["Error: ValueError: out of order"]]


@pytest.mark.parametrize(
    "bad",
    [says("", ToolCall("divide", {})), says("", errors=["Error: cut off"]), says("", ToolCall("add", {"a": 1}))],
    ids=["unknown", "unparsable", "failed"],
)
def test_endless_invalid_calls_are_limited(bad: Turn) -> None:
    session = session_of(*[bad] * 10)
    output = run(session, max_invalid_calls=3)
    assert output.termination is Termination.TOOL_ERROR
    assert len(session.trajectories[0].sampling_params) == 3
    assert len(contents(session)) == 3


def test_one_good_call_starts_the_count_of_invalid_turns_again() -> None:
    bad, good = says("", ToolCall("divide", {})), says("", add(1, 1), ToolCall("divide", {}))
    session = session_of(bad, good, bad, says("4"))
    assert run(session, max_invalid_calls=2).termination is Termination.COMPLETED


def test_invalid_calls_without_a_limit_go_on() -> None:
    session = session_of(*[says("", errors=["Error"])] * 9, says("4"))
    assert run(session, max_invalid_calls=None).termination is Termination.COMPLETED


def test_hundreds_of_bad_calls_in_one_turn_get_a_few_observations() -> None:
    session = session_of(says("", errors=[f"Error {number}" for number in range(300)]), says("4"))
    run(session, max_parallel_calls=2)
    assert contents(session) == [["Error 0", "Error 1", "Error: 298 more invalid tool calls"]]


def test_calls_beyond_the_parallel_limit_are_told_so() -> None:
    session = session_of(says("", add(1, 1), add(2, 2), add(3, 3)), says("done"))
    output = run(session, max_parallel_calls=2)
    assert session.calls == [add(1, 1), add(2, 2)]
    refusal = "Error: not run, at most 2 calls are allowed in one turn"
    assert contents(session) == [["2", "4", refusal]]
    assert [m.get("tool_call_id") for m in output.messages if m["content"] == refusal] == ["call-3-3"]


@pytest.mark.parametrize(
    ("side", "kept"),
    [
        ("left", "[the beginning was cut]\nw8 w9"),
        ("right", "w0 w1 \n[the rest was cut]"),
        ("middle", "w0 w9\n[the middle was cut]"),
    ],
    ids=["left", "right", "middle"],
)
def test_truncation_left_keeps_the_tail_and_says_what_is_missing(side: str, kept: str) -> None:
    long = " ".join(f"w{i}" for i in range(10))
    session = FakeSession([says("", ToolCall("long", {})), says("ok")], tools={"long": lambda: long})
    run(session, max_tool_response_tokens=2, tool_response_truncation=side)
    assert contents(session) == [[kept]]


def test_tool_response_limit_is_in_tokens() -> None:
    """Three words of 100 characters are three tokens: the limit of 3 keeps them, a limit of 2 drops one."""
    words = " ".join(["x" * 100] * 3)
    for limit, expected in [(3, words), (2, words[:202] + "\n[the rest was cut]")]:
        session = FakeSession([says("", ToolCall("words", {})), says("ok")], tools={"words": lambda: words})
        run(session, max_tool_response_tokens=limit)
        assert contents(session) == [[expected]]


def test_megabytes_from_a_tool_are_cut() -> None:
    session = FakeSession([says("", ToolCall("flood", {})), says("ok")], tools={"flood": lambda: "x " * 500_000})
    assert run(session, max_tool_response_tokens=5).termination is Termination.COMPLETED
    assert contents(session) == [["x x x x x \n[the rest was cut]"]]


def test_tool_message_that_fits_exactly_is_kept() -> None:
    """The message needs four tokens of the six; one more or less decides."""
    turns = says("", add(2, 2)), says("", finish="length")
    session = session_of(*turns, budget=6)
    output = run(session)
    assert (output.termination, output.response_mask) == (Termination.LENGTH, [1, 1, 0, 0, 0, 0])
    session = session_of(*turns, budget=5)
    output = run(session)
    assert (output.termination, output.response_mask) == (Termination.LENGTH, [1, 1])
    assert len(session.trajectories[0].sampling_params) == 1


@pytest.mark.parametrize(("finish", "expected"), [("length", Termination.LENGTH), ("abort", Termination.ABORTED)])
def test_unfinished_turn_runs_no_tools(finish: str, expected: Termination) -> None:
    session = session_of(says("", add(2, 2), finish=finish))
    assert run(session).termination is expected
    assert session.calls == []


def test_call_in_the_last_assistant_turn_is_not_run() -> None:
    session = session_of(says("", add(1, 1)), says("", add(2, 2)), says("never"))
    output = run(session, max_assistant_turns=2)
    assert output.termination is Termination.MAX_TURNS
    assert session.calls == [add(1, 1)]
    assert output.response_mask[-1] == 1


def test_answer_in_the_last_assistant_turn_completes() -> None:
    session = session_of(says("", add(1, 1)), says("2"))
    assert run(session, max_assistant_turns=2).termination is Termination.COMPLETED


def judge(*verdicts: bool) -> Any:
    """An interaction that ends the conversation at the first True."""
    answers = iter(verdicts)

    def answer(messages: Sequence[Message]) -> InteractionTurn:
        assert messages[-1]["role"] == "assistant"
        right = next(answers)
        return InteractionTurn(right, "try again", float(right))

    return answer


def test_interaction_answers_until_it_ends_the_conversation() -> None:
    session = session_of(says("5"), says("", add(2, 2)), says("4"), interaction=judge(False, True))
    output = run(session)
    assert output.termination is Termination.COMPLETED
    assert output.turn_scores == [0.0, 1.0]
    assert [m["role"] for m in output.messages] == [
        "system", "user", "assistant", "user", "assistant", "tool", "assistant",
    ]  # fmt: skip


def test_user_turns_are_limited_and_the_last_answer_is_judged() -> None:
    session = session_of(says("5"), says("6"), interaction=judge(False, False))
    output = run(session, max_user_turns=1)
    assert (output.termination, output.turn_scores) == (Termination.MAX_TURNS, [0.0, 0.0])
    assert contents(session) == [["try again"]]


def test_tool_turns_are_no_user_turns() -> None:
    session = session_of(says("", add(1, 1)), says("5"), says("4"), interaction=judge(False, True))
    assert run(session, max_user_turns=1).termination is Termination.COMPLETED


def test_last_assistant_turn_is_judged() -> None:
    session = session_of(says("5"), interaction=judge(False))
    output = run(session, max_assistant_turns=1)
    assert (output.termination, output.turn_scores, contents(session)) == (Termination.MAX_TURNS, [0.0], [])


def test_interaction_that_raises_ends_with_env_error_and_its_reason() -> None:
    def broken(messages: Sequence[Message]) -> InteractionTurn:
        raise ValueError("no such room")

    output = run(session_of(says("5"), interaction=broken))
    assert output.termination is Termination.ENV_ERROR
    assert output.error == "ValueError: no such room"
    assert output.response_mask == [1, 1]


def test_an_engine_that_fails_in_the_interaction_fails_the_trajectory() -> None:
    def broken(messages: Sequence[Message]) -> InteractionTurn:
        raise EngineError("the opponent's engine is gone")

    with pytest.raises(EngineError, match="the opponent's engine is gone"):
        run(session_of(says("5"), interaction=broken))


def test_user_message_that_does_not_fit_ends_with_length() -> None:
    session = session_of(says("5"), interaction=judge(False), budget=4)
    output = run(session)
    assert (output.termination, output.response_mask) == (Termination.LENGTH, [1, 1])


def test_concurrent_trajectories_do_not_share_state() -> None:
    sessions = [session_of(*[says("", ToolCall("divide", {}))] * 2, says("4")) for _ in range(20)]
    loop = ToolAgentLoop(
        ToolAgentConfig(max_invalid_calls=3), AgentLoopContext(sessions[0].renderer, None, ("add",), (), 100)
    )

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(loop.run({}, session=s, raw_prompt=PROMPT) for s in sessions))

    assert {output.termination for output in asyncio.run(all_of_them())} == {Termination.COMPLETED}


def test_unreadable_call_without_any_call_is_answered_as_a_user() -> None:
    """Some chat templates refuse a tool message where no call went before it."""
    session = session_of(says("", errors=["Error: cut off"]), says("ok"))
    run(session)
    assert [message["role"] for message in session.trajectories[0].messages if message["role"] != "assistant"][
        -1
    ] == "user"
