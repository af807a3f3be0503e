import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from agentrl_core.api import (
    AgentLoopContext,
    AgentLoopOutput,
    InteractionTurn,
    Message,
    Termination,
    ToolCall,
    Turn,
)
from agentrl_loop_tool_agent.compacting import HEADING, POSTPONED, CompactingToolAgentLoop
from agentrl_loop_tool_agent.config import CompactingToolAgentConfig
from agentrl_testing.contracts.agent_loop import check_prefixes, check_rows
from agentrl_testing.contracts.scripted_session import LoopRun, tool_call
from agentrl_testing.loops import FakeSession

PROMPT: list[Message] = [{"role": "system", "content": "Use tools."}, {"role": "user", "content": "What is 2 + 2?"}]
ASK = "Summarise."


def config(**options: Any) -> CompactingToolAgentConfig:
    return CompactingToolAgentConfig(**{"summary_instruction": ASK, "max_summary_tokens": 100, **options})


def look(word: str) -> str:
    """Looks a word up."""
    return f"about {word}"


CALLS = [tool_call("look", {"word": word}) for word in ("one", "two", "three")]


def run(turns: Sequence[str], length: int = 330, **options: Any) -> tuple[list[AgentLoopOutput], LoopRun]:
    """A trajectory in the real session; one byte is one token, a turn takes about 50 and its tool message 75."""
    world = LoopRun(
        lambda context: CompactingToolAgentLoop(config(**options), context), turns, {"look": look},
        max_response_length=length,
    )  # fmt: skip
    rows = asyncio.run(world.trajectory(PROMPT))
    check_rows(rows, world.policy.requests)
    check_prefixes(world.policy.requests)
    assert len({row.trajectory_id for row in rows}) == 1 and len({row.termination for row in rows}) == 1
    return rows, world


def shown(world: LoopRun, request: int) -> str:
    return world.renderer.decode(world.policy.requests[request].prompt_ids)


def test_a_nearly_full_context_is_summarised_and_both_rows_are_trained() -> None:
    rows, world = run([CALLS[0], "One is known.", "It is 4."], compact_below=280)
    assert [row.termination for row in rows] == [Termination.COMPLETED] * 2
    for row in rows:
        lengths = {len(row.response_ids), len(row.response_mask), len(row.response_logprobs), len(row.turn_ids)}
        assert lengths == {len(row.response_ids)} and len(row.policy_versions) == len(row.response_ids)
        assert row.metrics == {"compactions": 1.0, "cut_summaries": 0.0}
        assert row.turn_texts == [CALLS[0], "One is known.", "It is 4."]
    turns = [sorted({turn for turn in row.turn_ids if turn >= 0}) for row in rows]
    assert turns == [[0, 1], [2]]
    assert POSTPONED in shown(world, 1) and shown(world, 1).endswith(f"{ASK}<|im_end|>\n<|im_start|>assistant\n")
    # The turn that was summarised last is context in the new row, with the answer that the old one had no room for.
    seen = shown(world, 2)
    assert f"What is 2 + 2?\n\n{HEADING}\nOne is known." in seen and "about one" in seen and POSTPONED not in seen
    assert "Use tools." in seen and ASK not in seen


def test_enough_context_is_left_alone() -> None:
    rows, world = run([CALLS[0], "It is 4."], length=2000, compact_below=280)
    assert len(rows) == 1 and len(world.policy.requests) == 2 and rows[0].metrics["compactions"] == 0


def test_compactions_are_bounded_and_no_row_is_longer_than_the_budget() -> None:
    turns = [CALLS[0], "First summary.", CALLS[1], "Second summary.", *CALLS * 20]
    rows, world = run(turns, compact_below=280, max_compactions=2)
    assert rows[-1].termination is Termination.LENGTH and rows[-1].metrics["compactions"] == 2
    assert len(rows) == 3 and all(len(row.response_ids) <= 330 for row in rows)
    # The second summary stands for the first one.
    last = shown(world, 4)
    assert "Second summary." in last and "First summary." not in last


def test_a_summary_right_after_a_summary_needs_a_turn_between() -> None:
    """Not even a limit above the whole context asks twice in a row."""
    rows, world = run([CALLS[0], "S.", CALLS[1], "S.", "It is 4."], length=600, compact_below=10_000, max_compactions=5)
    assert len(rows) == 3 and rows[-1].termination is Termination.COMPLETED
    assert [ASK in shown(world, number) for number in range(5)] == [False, True, False, True, False]


def test_a_summary_that_is_cut_is_used_and_says_so() -> None:
    rows, world = run([CALLS[0], "word " * 50, "It is 4."], compact_below=280, max_summary_tokens=20)
    assert rows[-1].termination is Termination.COMPLETED and rows[-1].metrics["cut_summaries"] == 1
    assert sum(rows[0].response_mask) == sum(bool(turn >= 0) for turn in rows[0].turn_ids)
    assert f"{HEADING}\n{'word ' * 4}\n[the rest was cut]" in shown(world, 2)


def test_an_instruction_that_does_not_fit_goes_on_without_a_summary() -> None:
    rows, world = run([CALLS[0], "It is 4."], compact_below=280, summary_instruction="long " * 100)
    assert len(rows) == 1 and rows[0].termination is Termination.COMPLETED and rows[0].metrics["compactions"] == 0
    assert "about one" in shown(world, 1)


def test_a_summary_and_answers_that_do_not_fit_end_with_length() -> None:
    """The new row has no room to sample: only the old one is left, and trained."""

    def long(word: str) -> str:
        """Says much."""
        return word * 150

    world = LoopRun(
        lambda context: CompactingToolAgentLoop(config(compact_below=250), context),
        [tool_call("long", {"word": "x"}), "S" * 90],
        {"long": long},
        max_response_length=330,
    )
    prompt = world.renderer.render(PROMPT, [world.hosts["long"].schemas["long"]], generation_prompt=True)
    longest = len(world.renderer.encode(prompt)) + 300
    limits = dataclasses.replace(world.environment.limits, max_model_len=longest)
    world.environment = dataclasses.replace(world.environment, limits=limits)
    (row,) = asyncio.run(world.trajectory(PROMPT))
    check_rows([row], world.policy.requests)
    assert len(world.policy.requests) == 2 and any(row.response_mask)
    assert row.termination is Termination.LENGTH and row.metrics["compactions"] == 1


def test_kept_messages_begin_with_the_call_that_they_answer() -> None:
    turns = [*CALLS[:2], "Two are known.", "It is 4."]
    for keep, expected in [(0, ["two"]), (3, ["one", "two"]), (100, ["one", "two"])]:
        rows, world = run(turns, length=460, compact_below=330, keep_messages=keep)
        assert rows[-1].metrics["compactions"] == 1
        roles = [message["role"] for message in rows[-1].messages]
        assert roles == ["system", "user", *["assistant", "tool"] * len(expected), "assistant"]
        assert [word for word in ("one", "two") if f"about {word}" in shown(world, 3)] == expected


def test_calls_after_a_summary_have_ids_of_their_own() -> None:
    rows, _ = run([CALLS[0], "S.", CALLS[1], "It is 4."], length=600, compact_below=545, max_compactions=1)
    ids = [call["id"] for message in rows[-1].messages for call in message.get("tool_calls", ())]
    assert len(ids) == 2 and len(set(ids)) == 2


def fake(session: FakeSession, question: Any = "What?", **options: Any) -> list[AgentLoopOutput]:
    loop = CompactingToolAgentLoop(config(**options), AgentLoopContext(session.renderer, None, (), (), session.budget))
    output = asyncio.run(loop.run({}, session=session, raw_prompt=[{"role": "user", "content": question}]))
    return output if isinstance(output, list) else [output]


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n\n".join(part["text"] for part in content)


def says(content: str, *calls: ToolCall, errors: Sequence[str] = (), finish: Any = "stop") -> Turn:
    return Turn([7, 8], content, finish, content, calls, errors)


def test_an_interaction_goes_on_after_a_summary() -> None:
    """No two user messages follow each other: some chat templates refuse them."""
    answers = iter([InteractionTurn(False, "Try again."), InteractionTurn(True, "")])
    session = FakeSession(
        [says("5"), says("I said 5."), says("4")], interaction=lambda messages: next(answers), budget=40
    )
    rows = fake(session, compact_below=37)
    assert rows[-1].termination is Termination.COMPLETED and len(rows) == 2
    for trajectory in session.trajectories:
        roles = [message["role"] for message in trajectory.messages]
        assert all(one != other for one, other in zip(roles, roles[1:], strict=False))
    assert session.trajectories[1].messages[-2]["content"] == "Try again."


def test_every_tool_message_of_a_turn_moves_to_the_new_row() -> None:
    calls = [ToolCall("add", {"a": a, "b": 1}, f"c{a}") for a in (1, 2)]
    session = FakeSession([says("", *calls, errors=["Error: bad"]), says("S"), says("4")],
                          tools={"add": lambda a, b: a + b}, budget=60)  # fmt: skip
    fake(session, compact_below=58)
    first, second = ([m["content"] for m in t.messages if m["role"] == "tool"] for t in session.trajectories)
    assert first == [POSTPONED] * 3 and second == ["2", "3", "Error: bad"]


@pytest.mark.parametrize("content", ["What?", [{"type": "text", "text": "What?"}]], ids=["text", "parts"])
def test_a_call_in_place_of_a_summary_is_not_run(content: Any) -> None:
    call = ToolCall("add", {"a": 1, "b": 1}, "c")
    session = FakeSession([says("", call), Turn([7], "<call>", "stop", "", (call,)), says("4")],
                          tools={"add": lambda a, b: a + b}, budget=60)  # fmt: skip
    fake(session, content, compact_below=58)
    assert len(session.calls) == 1
    assert f"What?\n\n{HEADING}\n<call>" in _text(session.trajectories[1].messages[0]["content"])


def test_an_abort_of_the_summary_is_not_trained() -> None:
    call = ToolCall("add", {"a": 1, "b": 1}, "c")
    session = FakeSession([says("", call), says("half", finish="abort")], tools={"add": lambda a, b: a + b}, budget=60)
    assert {row.termination for row in fake(session, compact_below=58)} == {Termination.ABORTED}


def test_a_limit_above_the_budget_is_told(caplog: pytest.LogCaptureFixture) -> None:
    context = AgentLoopContext(FakeSession([]).renderer, None, (), (), 100)
    with caplog.at_level(logging.WARNING):
        CompactingToolAgentLoop(config(compact_below=100), context)
    assert "compact_below=100 is not less than rollout.max_response_length=100" in caplog.text
