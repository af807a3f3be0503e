"""The endpoint over HTTP: what clients send, what is refused, and what slow or greedy clients get."""

import asyncio
import json
import math
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel

from agentrl_core.api import EngineError, Termination, ToolCall, Turn
from agentrl_loop_openai_agent import app, server
from agentrl_loop_openai_agent.config import OpenAIAgentConfig
from agentrl_loop_openai_agent.conversation import Conversation
from agentrl_loop_openai_agent.server import MODEL_NAME, EndpointServer
from agentrl_testing.loops import FakeSession

USER = {"role": "user", "content": "two plus two"}
SCHEMA = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": SCHEMA}
CALLING = Turn((1, 2, 3), "let me see, add(2)", "stop", "let me see", (ToolCall("add", {"a": 2}, "call00001"),))
CLAUDE_TOOL: Any = {"name": "add", "description": "Adds.", "input_schema": SCHEMA["parameters"]}
UNENFORCED: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
    {"tool_choice": "required", "tools": [TOOL]},
    {"tool_choice": {"type": "function", "function": {"name": "add"}}, "tools": [TOOL]},
    {"chat_template_kwargs": {"enable_thinking": False}},
]
ROLES = ["system", "user", "assistant", "tool", "assistant"]

Body = Callable[[AsyncOpenAI, Conversation], Awaitable[Any]]


LETTERS = "abcdefghijklmnopqrstuvwxyz"


def serve(
    body: Body, turns: Any = ("four",), budget: int = 10_000, capabilities: Any = (), **options: Any
) -> tuple[Any, FakeSession]:
    """Run ``body`` with a client of an endpoint; its result, and the session behind the endpoint."""
    session = FakeSession(turns, budget=budget)

    def decode(ids: list[int]) -> str:
        return "".join(LETTERS[i] if i < len(LETTERS) else "\ufffd" for i in ids)

    async def run() -> Any:
        endpoint = EndpointServer(OpenAIAgentConfig(agent="json:dumps", **options), decode, frozenset(capabilities))
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
        {"frequency_penalty": 0, "presence_penalty": 0.0, "top_logprobs": None, "logit_bias": {}},
        {"tools": [TOOL], "tool_choice": "auto"},
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
    [
        {"n": 0},
        {"top_logprobs": 2},
        {"frequency_penalty": 0.5},
        {"logit_bias": {"1": 2}},
        {"temperature": 2.5},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": math.nan},
        {"modalities": ["audio"]},
        *UNENFORCED,
    ],
    ids=json.dumps,
)
def test_what_would_change_the_answer_is_refused_by_name(field: dict[str, Any]) -> None:
    answer, _ = serve(lambda client, _: post(client, {"messages": [USER], **field}))
    assert answer.status_code == 400 and next(iter(field)) in answer.json()["error"]["message"]


@pytest.mark.parametrize("field", UNENFORCED, ids=json.dumps)
def test_what_no_engine_enforces_can_be_accepted(field: dict[str, Any]) -> None:
    answer, _ = serve(lambda client, _: post(client, {"messages": [USER], **field}), unenforced="accept")
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (
            "responses",
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "x"}}},
            "response_format: this run's engine has no capability 'json_schema'",
        ),
        (
            "messages",
            {"messages": [USER], "max_tokens": 9, "output_config": {"format": {"type": "json_schema", "schema": {}}}},
            "response_format: this run's engine has no capability 'json_schema'",
        ),
        (
            "messages",
            {"messages": [USER], "max_tokens": 9, "tool_choice": {"type": "any"}},
            "tool_choice: no engine constrains",
        ),
        (
            "messages",
            {"messages": [USER], "max_tokens": 9, "tool_choice": {"type": {"name": "add"}}},
            "tool_choice.type is {'name': 'add'}; it must be a text",
        ),
    ],
)
def test_the_other_protocols_refuse_it_too(path: str, body: dict[str, Any], reason: str) -> None:
    answer, session = serve(lambda client, _: post(client, body, path))
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"]
    assert session.trajectories == []


SPOKEN = [Turn((ord(text) - 97,), text, "stop", text, (), (), (-0.25 * n,)) for n, text in enumerate("abc", 1)]


@pytest.mark.parametrize("streams", [False, True])
def test_the_official_client_gets_its_choices_with_log_probs(streams: bool) -> None:
    async def body(client: AsyncOpenAI, conversation: Conversation) -> Any:
        request: Any = {"model": MODEL_NAME, "messages": [USER], "n": 3, "logprobs": True}
        if streams:
            options: Any = {"include_usage": True}
            async with client.chat.completions.stream(**request, stream_options=options) as stream:
                return await stream.get_final_completion()
        return await client.chat.completions.create(**request)

    answer, session = serve(body, SPOKEN)
    assert [(choice.index, choice.message.content, choice.finish_reason) for choice in answer.choices] == [
        (0, "a", "stop"), (1, "b", "stop"), (2, "c", "stop"),
    ]  # fmt: skip
    said = [choice.logprobs.content[0] for choice in answer.choices]
    assert [(each.token, each.logprob, each.bytes) for each in said] == [
        ("a", -0.25, [97]), ("b", -0.5, [98]), ("c", -0.75, [99]),
    ]  # fmt: skip
    assert answer.usage.completion_tokens == 3
    assert len(session.trajectories) == 1, "the choices are forks of one record"


@pytest.mark.parametrize("streams", [False, True])
def test_log_probs_over_the_responses_api(streams: bool) -> None:
    turn = Turn((0, 99), "a", "stop", "a", (), (), (-0.5, -0.25))

    async def body(client: AsyncOpenAI, _: Conversation) -> Any:
        request: Any = {"model": MODEL_NAME, "input": "x", "include": ["message.output_text.logprobs"]}
        if streams:
            async with client.responses.stream(**request) as stream:
                return await stream.get_final_response()
        return await client.responses.create(**request)

    answer, _ = serve(body, [turn])
    found = [(each.token, each.logprob, each.bytes) for each in answer.output[0].content[0].logprobs]
    assert found == [("a", -0.5, [97]), ("\ufffd", -0.25, None)], "part of a character has no bytes"


def test_an_engine_without_log_probs_says_so() -> None:
    answer, _ = serve(lambda client, _: post(client, {"messages": [USER], "logprobs": True}))
    assert answer.status_code == 400 and "reports no log-probabilities" in answer.json()["error"]["message"]


def test_parse_of_the_official_client_gives_an_object() -> None:
    class Total(BaseModel):
        total: int

    async def body(client: AsyncOpenAI, _: Conversation) -> Any:
        answer = await client.chat.completions.parse(model=MODEL_NAME, messages=[USER], response_format=Total)  # type: ignore[list-item]
        return answer.choices[0].message.parsed

    assert serve(body, ['{"total": 4}'], unenforced="accept")[0] == Total(total=4)


TOTAL = {"type": "object", "properties": {"total": {"type": "integer"}}, "required": ["total"]}
FORMAT = {"type": "json_schema", "schema": TOTAL}


@pytest.mark.parametrize(
    ("path", "body", "schema"),
    [
        ("chat/completions", {"response_format": {"type": "json_schema", "json_schema": FORMAT}}, TOTAL),
        ("chat/completions", {"response_format": {"type": "json_object"}}, {"type": "object"}),
        ("chat/completions", {"response_format": {"type": "text"}}, None),
        ("responses", {"input": "x", "text": {"format": {**FORMAT, "name": "x"}}}, TOTAL),
        ("messages", {"max_tokens": 9, "output_config": {"format": FORMAT}}, TOTAL),
        ("messages", {"max_tokens": 9, "output_config": {"effort": "low"}}, None),
    ],
)
def test_an_engine_that_can_is_given_the_schema(path: str, body: dict[str, Any], schema: Any) -> None:
    messages = {} if path == "responses" else {"messages": [USER]}
    answer, session = serve(lambda client, _: post(client, {**messages, **body}, path), capabilities=["json_schema"])
    assert answer.status_code == 200, answer.text
    (params,) = session.trajectories[0].sampling_params
    assert json.loads(params.get("json_schema", "null")) == schema


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format: expected"),
        ({"response_format": {"type": "grammar"}}, "response_format: expected"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
            "response_format: $.type of the schema: 'nonsense' is not",
        ),
        ({"response_format": {"type": "json_object"}, "tools": [TOOL]}, "could not call the tools"),
    ],
)
def test_a_format_that_cannot_be_kept_is_the_clients_fault(field: dict[str, Any], reason: str) -> None:
    answer, session = serve(lambda client, _: post(client, {"messages": [USER], **field}), capabilities=["json_schema"])
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"], answer.text
    assert session.trajectories == []


@pytest.mark.parametrize(
    "calls",
    [
        "add",
        {"id": "1", "function": {"name": "add", "arguments": "{}"}},
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
            (reply,) = prepare(*args, **kwargs)
            generate = reply.generate

            async def later() -> Any:
                await asyncio.sleep(0.2)
                return await generate()

            reply.generate = later  # type: ignore[method-assign]
            return [reply]

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


def claude(client: AsyncOpenAI) -> anthropic.AsyncAnthropic:
    """Anthropic's client for the same endpoint; it adds /v1 itself."""
    return anthropic.AsyncAnthropic(
        base_url=str(client.base_url).removesuffix("/v1/"), api_key=client.api_key, max_retries=0
    )


@pytest.mark.parametrize("streams", [False, True])
def test_a_conversation_of_anthropics_client_is_one_branch(streams: bool) -> None:
    async def body(client: AsyncOpenAI, conversation: Conversation) -> Any:
        agent, history = claude(client), [{"role": "user", "content": [{"type": "text", "text": "two plus two"}]}]

        async def ask() -> Any:
            request: Any = {"model": MODEL_NAME, "max_tokens": 50, "messages": history, "system": "add"}
            if not streams:
                return await agent.messages.create(**request, tools=[CLAUDE_TOOL])
            async with agent.messages.stream(**request, tools=[CLAUDE_TOOL]) as stream:
                return await stream.get_final_message()

        first = await ask()
        result = {
            "type": "tool_result",
            "tool_use_id": first.content[-1].id,
            "content": [{"type": "text", "text": "4"}],
        }
        history += [
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
            {"role": "user", "content": [result]},
        ]
        return first, await ask(), conversation.finish(Termination.COMPLETED)

    (first, second, outputs), session = serve(body, [CALLING, "four"])
    assert [block.type for block in first.content] == ["text", "tool_use"]
    assert (first.content[0].text, first.content[1].name, first.content[1].input) == ("let me see", "add", {"a": 2})
    assert (first.stop_reason, second.stop_reason) == ("tool_use", "end_turn")
    assert second.content[0].text == "four"
    assert second.usage.input_tokens > first.usage.input_tokens > 0 < second.usage.output_tokens
    assert len(outputs) == len(session.trajectories) == 1
    assert [message["role"] for message in session.trajectories[0].messages] == ROLES


def test_anthropics_client_gets_its_own_errors() -> None:
    async def body(client: AsyncOpenAI, _: Conversation) -> Any:
        found: list[Any] = []
        agent = claude(client)
        for changes in ({"model": "other"}, {"messages": [{"role": "user", "content": [{"type": "document"}]}]}):
            request: Any = {"model": MODEL_NAME, "max_tokens": 5, "messages": [USER], **changes}
            try:
                await agent.messages.create(**request)
            except anthropic.APIStatusError as error:
                found.append((type(error).__name__, error.body["error"]["type"], error.body["error"]["message"]))  # type: ignore[index, call-overload]
        agent.api_key = "wrong"
        with pytest.raises(anthropic.AuthenticationError, match="no run has this API key"):
            await agent.messages.create(model=MODEL_NAME, max_tokens=5, messages=[USER])  # type: ignore[list-item]
        return found

    (model, image), _ = serve(body)
    assert model[:2] == ("NotFoundError", "not_found_error") and "there is 'policy'" in model[2]
    assert image[:2] == ("BadRequestError", "invalid_request_error")
    assert "messages[0]: blocks of type 'document' are not supported" in image[2]


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_a_failed_engine_ends_a_stream_with_an_error(path: str) -> None:
    asked = {"input": "x"} if path == "responses" else {"messages": [USER], "max_tokens": 9}

    async def body(client: AsyncOpenAI, conversation: Conversation) -> Any:
        prepare = conversation.prepare

        async def failing() -> Any:
            raise EngineError("out of memory")

        def prepared(*args: Any) -> Any:
            (reply,) = prepare(*args)
            reply.generate = failing  # type: ignore[method-assign]
            return [reply]

        conversation.prepare = prepared  # type: ignore[method-assign]
        return await post(client, {**asked, "stream": True}, path)

    answer, _ = serve(body)
    assert answer.status_code == 200
    (line,) = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    assert "out of memory" in json.loads(line.removeprefix("data: "))["error"]["message"]


def test_a_streamed_conversation_over_the_responses_api_is_one_branch() -> None:
    async def body(client: AsyncOpenAI, conversation: Conversation) -> Any:
        history: list[Any] = [{"role": "user", "content": "two plus two"}]
        answers, texts = [], []
        for _ in range(2):
            async with client.responses.stream(
                model=MODEL_NAME, instructions="add", input=history, tools=[{"type": "function", **SCHEMA}]
            ) as stream:
                async for each in stream:
                    if each.type == "response.output_text.delta":
                        texts.append(each.delta)
                answers.append(await stream.get_final_response())
            history += [item.model_dump() for item in answers[-1].output]
            if call := next((item for item in answers[-1].output if item.type == "function_call"), None):
                history.append({"type": "function_call_output", "call_id": call.call_id, "output": "4"})
        return answers, texts, conversation.finish(Termination.COMPLETED)

    (answers, texts, outputs), session = serve(body, [CALLING, "four"])
    assert texts == ["let me see", "four"]
    assert json.loads(answers[0].output[-1].arguments) == {"a": 2}
    assert [answer.status for answer in answers] == ["completed", "completed"]
    assert len(outputs) == 1
    assert [message["role"] for message in session.trajectories[0].messages] == ROLES


@pytest.mark.parametrize("protocol", ["chat", "messages"])
def test_a_stop_text_is_recorded_and_not_told(protocol: str) -> None:
    """The client sends the answer back as it got it; that continues the branch."""

    async def body(client: AsyncOpenAI, conversation: Conversation) -> Any:
        history: list[Any] = [USER]

        async def ask() -> tuple[str, Any]:
            if protocol == "chat":
                chat = await client.chat.completions.create(model=MODEL_NAME, messages=history, stop=["Observation:"])
                return chat.choices[0].message.content or "", chat.choices[0].finish_reason
            said = await claude(client).messages.create(
                model=MODEL_NAME, max_tokens=99, messages=history, stop_sequences=["Observation:"]
            )
            return said.content[0].text, said.stop_sequence  # type: ignore[union-attr]

        first = await ask()
        history += [{"role": "assistant", "content": first[0]}, {"role": "user", "content": "sunny"}]
        return first, await ask(), conversation.finish(Termination.COMPLETED)

    (first, second, outputs), session = serve(body, ["Action: look\nObservation:", "done"])
    assert first == ("Action: look\n", "stop" if protocol == "chat" else "Observation:")
    assert second == ("done", "stop" if protocol == "chat" else None)
    assert len(outputs) == len(session.trajectories) == 1
    assert session.trajectories[0].messages[1]["content"] == "Action: look\nObservation:"
