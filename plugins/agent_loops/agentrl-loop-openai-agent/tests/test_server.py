"""The endpoint over HTTP: what clients send, what is refused, and what slow or greedy clients get."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel

from agentrl_core.api import Termination, ToolCall, Turn
from agentrl_core.testing.loops import FakeSession
from agentrl_loop_openai_agent import app, server
from agentrl_loop_openai_agent.config import OpenAIAgentConfig
from agentrl_loop_openai_agent.conversation import Conversation
from agentrl_loop_openai_agent.server import MODEL_NAME, EndpointServer

USER = {"role": "user", "content": "two plus two"}
SCHEMA = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": SCHEMA}
CALLING = Turn((1, 2, 3), "let me see, add(2)", "stop", "let me see", (ToolCall("add", {"a": 2}, "call00001"),))

Body = Callable[[AsyncOpenAI, Conversation], Awaitable[Any]]


def serve(body: Body, turns: Any = ("four",), budget: int = 10_000, **options: Any) -> tuple[Any, FakeSession]:
    """Run ``body`` with a client of an endpoint; its result, and the session behind the endpoint."""
    session = FakeSession(turns, budget=budget)

    async def run() -> Any:
        endpoint = EndpointServer(OpenAIAgentConfig(agent="json:dumps", **options))
        async with endpoint.open(session, {}) as (key, conversation):
            async with AsyncOpenAI(base_url=endpoint.base_url, api_key=key, max_retries=0) as client:
                try:
                    return await body(client, conversation)
                finally:
                    await endpoint.close()

    return asyncio.run(asyncio.wait_for(run(), 30)), session


async def post(client: AsyncOpenAI, body: Any, path: str = "chat/completions") -> httpx.Response:
    headers = {"authorization": f"Bearer {client.api_key}"}
    content = body if isinstance(body, bytes) else json.dumps({"model": MODEL_NAME, **body}).encode()
    async with httpx.AsyncClient() as http:
        return await http.post(f"{client.base_url}{path}", content=content, headers=headers)


@pytest.mark.parametrize(
    "field",
    [
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "two "}, {"type": "text", "text": "more"}]}
            ]
        },
        {"messages": [{"role": "developer", "content": "be brief"}, USER]},
        {"stop": None},
        {"stop": []},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "top_logprobs": None, "logit_bias": {}},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "low", "modalities": ["text"]},
    ],
    ids=lambda field: json.dumps(field)[:40],
)
def test_what_clients_send_by_default_is_answered(field: dict[str, Any]) -> None:
    answer, session = serve(lambda client, _: post(client, {"messages": [USER], **field}))
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "four"
    (trajectory,) = session.trajectories
    assert all(isinstance(message["content"], str) for message in trajectory.messages)
    assert trajectory.messages[0]["role"] in ("user", "system")


@pytest.mark.parametrize(
    "field",
    [{"stop": ["Observation:"]}, {"frequency_penalty": 0.5}, {"logit_bias": {"1": 2}}, {"modalities": ["audio"]}],
    ids=json.dumps,
)
def test_what_would_change_the_answer_is_refused_by_name(field: dict[str, Any]) -> None:
    answer, _ = serve(lambda client, _: post(client, {"messages": [USER], **field}))
    assert answer.status_code == 400 and next(iter(field)) in answer.json()["error"]["message"]


def test_parse_of_the_official_client_gives_an_object() -> None:
    class Total(BaseModel):
        total: int

    async def body(client: AsyncOpenAI, _: Conversation) -> Any:
        answer = await client.chat.completions.parse(model=MODEL_NAME, messages=[USER], response_format=Total)  # type: ignore[list-item]
        return answer.choices[0].message.parsed

    assert serve(body, ['{"total": 4}'])[0] == Total(total=4)


@pytest.mark.parametrize(
    "calls",
    [
        "add",
        [1],
        [{"function": "add"}],
        [{"function": {"arguments": "{}"}}],
        [{"function": {"name": "add", "arguments": 1}}],
    ],
    ids=json.dumps,
)
def test_malformed_tool_calls_are_the_clients_fault(calls: Any) -> None:
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": calls}, USER]
    answer, session = serve(lambda client, _: post(client, {"messages": messages}))
    assert answer.status_code == 400 and "messages[1].tool_calls: expected" in answer.json()["error"]["message"]
    assert session.trajectories == []


def test_arguments_nested_too_deeply_do_not_break_the_endpoint() -> None:
    call = {"id": "1", "function": {"name": "add", "arguments": "[" * 100_000}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, USER]
    assert serve(lambda client, _: post(client, {"messages": messages}))[0].status_code == 200


def test_a_conversation_over_the_responses_api_is_one_branch() -> None:
    async def body(client: AsyncOpenAI, conversation: Conversation) -> Any:
        tools: Any = [{"type": "function", **SCHEMA}]
        history: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "two plus two"}]}]
        first = await client.responses.create(model=MODEL_NAME, instructions="add", input=history, tools=tools)
        call = first.output[-1]
        history += [item.model_dump() for item in first.output]
        history.append({"type": "function_call_output", "call_id": call.call_id, "output": "4"})  # type: ignore[union-attr]
        second = await client.responses.create(model=MODEL_NAME, instructions="add", input=history, tools=tools)
        return call, second.output_text, second.usage, conversation.finish(Termination.COMPLETED)

    (call, text, usage, outputs), session = serve(body, [CALLING, "four"])
    assert (call.name, json.loads(call.arguments), text) == ("add", {"a": 2}, "four")
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert len(outputs) == len(session.trajectories) == 1
    assert [message["role"] for message in session.trajectories[0].messages] == [
        "system", "user", "assistant", "tool", "assistant",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"input": "x", "stream": True}, "stream"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"type": "computer_call"}]}, "computer_call"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_responses_api_cannot_do_here_is_refused(body: dict[str, Any], reason: str) -> None:
    answer, _ = serve(lambda client, _: post(client, body, "responses"))
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"]


def test_a_prompt_above_the_context_is_refused_and_leaves_no_row() -> None:
    async def body(client: AsyncOpenAI, conversation: Conversation) -> Any:
        with pytest.raises(BadRequestError) as caught:
            await client.chat.completions.create(model=MODEL_NAME, messages=[{"role": "user", "content": "word " * 50}])
        return caught.value.code, conversation.exhausted, conversation.finish(Termination.LENGTH)

    assert serve(body, budget=0)[0] == ("context_length_exceeded", True, [])


def test_a_branch_too_many_is_refused() -> None:
    async def body(client: AsyncOpenAI, _: Conversation) -> Any:
        asked = [await post(client, {"messages": [{"role": "user", "content": str(n)}]}) for n in range(3)]
        return [answer.json().get("error", {}).get("code", "") for answer in asked]

    assert serve(body, ["a", "b", "c"], max_branches=2)[0] == ["", "", "too_many_branches"]


def test_a_long_request_is_tokenised_off_the_event_loop() -> None:
    threads: list[int] = []

    async def body(client: AsyncOpenAI, conversation: Conversation) -> Any:
        prepare = conversation.prepare

        def recorded(*args: Any, **kwargs: Any) -> Any:
            threads.append(threading.get_ident())
            return prepare(*args, **kwargs)

        conversation.prepare = recorded  # type: ignore[method-assign]
        for text in ("short", "long " * app.LARGE_BYTES):
            await post(client, {"messages": [{"role": "user", "content": text}]})
        return threading.get_ident()

    loop_thread, _ = serve(body, ["a", "b"])
    assert threads[0] == loop_thread != threads[1]


async def connect(client: AsyncOpenAI, request: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    writer.write(request.encode())
    return reader, writer


@pytest.mark.parametrize("request_", ["", "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"], ids=["nothing", "head"])
def test_a_connection_without_a_whole_request_is_closed(monkeypatch: pytest.MonkeyPatch, request_: str) -> None:
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.05)

    async def body(client: AsyncOpenAI, _: Conversation) -> bytes:
        reader, writer = await connect(client, request_)
        found = await reader.read()
        writer.close()
        return found

    assert serve(body)[0] == b""


def test_an_answer_that_takes_longer_than_the_idle_limit_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.01)

    async def body(client: AsyncOpenAI, conversation: Conversation) -> Any:
        prepare = conversation.prepare

        def slow(*args: Any, **kwargs: Any) -> Any:
            reply = prepare(*args, **kwargs)
            generate = reply.generate

            async def later() -> Any:
                await asyncio.sleep(0.2)
                return await generate()

            reply.generate = later  # type: ignore[method-assign]
            return reply

        conversation.prepare = slow  # type: ignore[method-assign]
        return await post(client, {"messages": [USER]})

    assert serve(body)[0].status_code == 200


def test_a_body_that_does_not_arrive_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_SECONDS", 0.05)

    async def body(client: AsyncOpenAI, _: Conversation) -> bytes:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {client.api_key}\r\n"
        reader, writer = await connect(client, f"{head}Content-Length: 10\r\n\r\n{{")
        found = await reader.readline()
        writer.close()
        return found

    assert b" 408 " in serve(body)[0]


def test_connections_beyond_the_limit_are_closed() -> None:
    async def body(client: AsyncOpenAI, _: Conversation) -> Any:
        first, second = await connect(client, ""), await connect(client, "")
        closed = b""
        try:
            closed = await second[0].read()
        except ConnectionResetError:
            pass
        is_open = not first[0].at_eof()
        for _, writer in (first, second):
            writer.close()
        return closed, is_open

    assert serve(body, max_connections=1)[0] == (b"", True)
