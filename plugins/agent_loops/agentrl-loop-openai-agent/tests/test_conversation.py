"""Which request continues which record."""

import asyncio

import pytest

from agentrl_core.api import EngineError, Termination
from agentrl_loop_openai_agent.conversation import BranchLimitError, ContextLengthError, Conversation
from agentrl_testing.contracts.scripted_session import TagParser
from agentrl_testing.loops import FakeSession

USER = {"role": "user", "content": "two plus two"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def ask(conversation: Conversation, messages, **kwargs):
    (reply,) = conversation.prepare(messages, **kwargs)
    return asyncio.run(reply.generate())


def assistant(text: str) -> dict:
    # As a client sends an answer back, with all the fields that it got.
    return {"role": "assistant", "content": text, "refusal": None, "tool_calls": None}


def test_a_request_that_extends_the_record_continues_it() -> None:
    session = FakeSession(["three", "four"])
    conversation = Conversation(session, {"temperature": 0.5})
    first = ask(conversation, [USER])
    second = ask(conversation, [USER, assistant("three"), {"role": "user", "content": "sure?"}])
    assert (first.turn.text, second.turn.text) == ("three", "four")
    assert (first.branch, second.branch, conversation.forks) == (0, 0, 0)
    (trajectory,) = session.trajectories
    assert trajectory.added == [[{"role": "user", "content": "sure?"}]]
    assert [params["temperature"] for params in trajectory.sampling_params] == [0.5, 0.5]
    assert second.prompt_tokens == first.prompt_tokens + len(first.turn.token_ids) + len(trajectory.mask) - 2


def test_tool_calls_come_back_as_json_text_and_still_match() -> None:
    session = FakeSession(['<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>', "four"], parser=TagParser())
    conversation = Conversation(session, {})
    ask(conversation, [USER], tools=TOOLS)
    call = {"type": "function", "id": "", "function": {"name": "add", "arguments": '{"a": 2}'}}
    sent = session.trajectories[0].messages[-1]["tool_calls"][0]
    call = {**call, "id": sent.get("id")}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    completion = ask(conversation, [USER, answer, {"role": "tool", "tool_call_id": "x", "content": "4"}], tools=TOOLS)
    assert completion.branch == 0 and not completion.forked


def test_reasoning_that_the_client_never_saw_makes_no_fork() -> None:
    session = FakeSession(["three", "four"])
    conversation = Conversation(session, {})
    ask(conversation, [USER])
    session.trajectories[0].messages[-1]["reasoning_content"] = "two and two"
    completion = ask(conversation, [USER, assistant("three"), {"role": "user", "content": "sure?"}])
    assert completion.branch == 0 and not completion.forked


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([{"role": "user", "content": "another question"}], id="another-question"),
        pytest.param([USER, assistant("edited"), {"role": "user", "content": "sure?"}], id="edited-answer"),
        pytest.param([USER], id="second-sample"),
    ],
)
def test_anything_else_is_a_fork_with_its_own_row(messages) -> None:
    session = FakeSession(["three", "four"])
    conversation = Conversation(session, {})
    ask(conversation, [USER])
    second = ask(conversation, messages)
    assert (second.branch, second.forked, conversation.forks) == (1, True, 1)
    outputs = conversation.finish(Termination.COMPLETED)
    assert len(outputs) == 2 and all(output.metrics["endpoint_forks"] == 1 for output in outputs)


def test_other_tools_are_a_fork() -> None:
    conversation = Conversation(FakeSession(["three", "four"]), {})
    ask(conversation, [USER])
    follow = [USER, assistant("three"), {"role": "user", "content": "sure?"}]
    assert ask(conversation, follow, tools=TOOLS).forked


def test_a_repeated_request_whose_answer_was_lost_gets_the_recorded_one() -> None:
    session = FakeSession(["three", "four"])
    conversation = Conversation(session, {})
    first = ask(conversation, [USER])
    again = ask(conversation, [USER], retried=True)
    assert again.replayed and again.turn is first.turn and again.prompt_tokens == first.prompt_tokens
    assert len(session.trajectories) == 1


def test_a_request_that_meets_a_running_one_is_a_fork() -> None:
    conversation = Conversation(FakeSession(["three", "four"]), {})
    (first,), (second,) = conversation.prepare([USER]), conversation.prepare([USER])
    assert not first.forked and second.forked


def test_a_generation_that_failed_is_asked_again_on_the_same_record() -> None:
    session = FakeSession(["three"])
    turns = session._turns
    session._turns = []
    conversation = Conversation(session, {})
    with pytest.raises(RuntimeError):
        ask(conversation, [USER])
    with pytest.raises(RuntimeError):
        conversation.finish(Termination.COMPLETED)
    session._turns = turns
    assert ask(conversation, [USER], retried=True).branch == 0
    assert len(conversation.finish(Termination.COMPLETED)) == 1


def test_messages_that_do_not_fit_are_refused_and_the_record_stays() -> None:
    session = FakeSession(["three"], budget=6)
    conversation = Conversation(session, {})
    ask(conversation, [USER])
    with pytest.raises(ContextLengthError, match="tokens are left of rollout.max_response_length"):
        ask(conversation, [USER, assistant("three"), {"role": "user", "content": "word " * 20}])
    assert conversation.exhausted
    (output,) = conversation.finish(Termination.LENGTH)
    assert len(output.response_ids) == 1


def test_the_smaller_of_both_limits_counts() -> None:
    session = FakeSession(["three", "four"])
    conversation = Conversation(session, {"max_tokens": 5})
    ask(conversation, [USER], max_tokens=3)
    ask(conversation, [{"role": "user", "content": "again"}], max_tokens=9)
    assert [t.sampling_params[0]["max_tokens"] for t in session.trajectories] == [3, 5]


def test_an_engine_error_is_raised_at_the_end_even_if_the_client_swallowed_it() -> None:
    conversation = Conversation(FakeSession([]), {})
    conversation.failure = EngineError("gone")
    with pytest.raises(EngineError, match="gone"):
        conversation.finish(Termination.COMPLETED)


def test_each_choice_is_a_branch_that_the_client_may_continue() -> None:
    session = FakeSession(["zero", "three", "four", "five", "six"])
    conversation = Conversation(session, {}, max_branches=3)
    ask(conversation, [USER])
    history = [USER, assistant("zero"), {"role": "user", "content": "sure?"}]
    chosen = [asyncio.run(reply.generate()) for reply in conversation.prepare(history, count=3)]
    assert [(each.text, each.branch, each.forked) for each in chosen] == [
        ("three", 0, False), ("four", 1, False), ("five", 2, False),
    ]  # fmt: skip
    assert len({each.prompt_tokens for each in chosen}) == 1 and conversation.forks == 0
    follow = [*history, assistant("five"), {"role": "user", "content": "more"}]
    assert ask(conversation, follow).branch == 2
    outputs = conversation.finish(Termination.COMPLETED)
    assert [sum(output.response_mask) for output in outputs] == [2, 1, 2], "the first answer is trained once"


def test_choices_beyond_the_branches_leave_the_record_as_it_was() -> None:
    conversation = Conversation(FakeSession(["zero", "three"]), {}, max_branches=2)
    ask(conversation, [USER])
    history = [USER, assistant("zero"), {"role": "user", "content": "sure?"}]
    with pytest.raises(BranchLimitError, match=r"1 branches and the request needs 2 more.*fewer choices \(n\)"):
        conversation.prepare(history, count=3)
    assert ask(conversation, history).branch == 0


def test_a_repeated_request_for_choices_gets_the_recorded_ones_and_the_missing_one() -> None:
    session = FakeSession(["three", "four"])
    conversation = Conversation(session, {})
    first, second = conversation.prepare([USER], count=2)
    asyncio.run(first.generate())
    second.release()
    again = [asyncio.run(reply.generate()) for reply in conversation.prepare([USER], retried=True, count=2)]
    assert [(each.text, each.replayed) for each in again] == [("three", True), ("four", False)]
    assert conversation.rows == 2
