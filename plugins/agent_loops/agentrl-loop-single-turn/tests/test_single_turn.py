import asyncio

import pytest

from agentrl_core.api import AgentLoopContext, AgentLoopOutput, NoConfig, Termination, Turn
from agentrl_loop_single_turn.loop import SingleTurnLoop
from agentrl_testing.loops import FakeSession

PROMPT = [{"role": "user", "content": "What is 2 + 2?"}]


def run(session: FakeSession) -> AgentLoopOutput:
    context = AgentLoopContext(session.renderer, session.parser, (), (), session.budget)
    output = asyncio.run(SingleTurnLoop(NoConfig(), context).run({"top_k": 3}, session=session, raw_prompt=PROMPT))
    assert isinstance(output, AgentLoopOutput)
    return output


def test_one_answer_completes() -> None:
    session = FakeSession(["It is 4 ."])
    output = run(session)
    assert output.termination is Termination.COMPLETED
    assert session.renderer.decode(output.response_ids) == "It is 4 ."
    assert output.response_mask == [1] * 4
    assert session.trajectories[0].sampling_params == [{"top_k": 3}]


def test_spent_budget_ends_with_length() -> None:
    output = run(FakeSession(["one two three"], budget=2))
    assert output.termination is Termination.LENGTH
    assert output.response_mask == [1, 1]


def test_no_budget_gives_an_empty_response_with_length() -> None:
    output = run(FakeSession(["never said"], budget=0))
    assert (output.termination, output.response_ids) == (Termination.LENGTH, [])


def test_aborted_turn_ends_with_aborted() -> None:
    assert run(FakeSession([Turn([], "", "abort", "")])).termination is Termination.ABORTED


def test_num_turns_counts_question_and_answer() -> None:
    assert run(FakeSession(["4"])).num_turns == 2


def test_other_fields_of_the_row_are_accepted() -> None:
    session = FakeSession(["4"])
    loop = SingleTurnLoop(NoConfig(), AgentLoopContext(session.renderer, None, (), (), 10))
    output = asyncio.run(loop.run({}, session=session, raw_prompt=PROMPT, extra_info={"index": 3}, data_source="sums"))
    assert isinstance(output, AgentLoopOutput)


def test_engine_failure_is_left_to_the_worker() -> None:
    with pytest.raises(RuntimeError, match="0 were scripted"):
        run(FakeSession([]))
