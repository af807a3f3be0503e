"""Images in requests: every protocol's form, the conversation that they belong to, and what is refused."""

import asyncio
import base64
import io
import json
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from openai import AsyncOpenAI
from PIL import Image

from agentrl_core.api import ImageError, Termination, ToolCall, Turn
from agentrl_core.config.schema import ModelConfig
from agentrl_core.data.chat_template import ChatTemplateRenderer
from agentrl_core.data.renderer import HFChatRenderer
from agentrl_core.engine_kit.images import read_image
from agentrl_core.rollout import session_images
from agentrl_core.rollout.identity import TrajectoryKey
from agentrl_core.rollout.session import RolloutSession, SessionEnvironment
from agentrl_core.rollout.trajectory import TrajectoryLimits
from agentrl_loop_openai_agent import images
from agentrl_loop_openai_agent.config import OpenAIAgentConfig
from agentrl_loop_openai_agent.conversation import Conversation
from agentrl_loop_openai_agent.images import as_sent
from agentrl_loop_openai_agent.server import MODEL_NAME, EndpointServer
from agentrl_testing.contracts.scripted_session import ScriptedPolicy
from agentrl_testing.loops import FakeSession
from agentrl_testing.tiny_vision import save_tiny_vision_model

SCHEMA = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
CLAUDE_TOOL = {"name": "look", "description": "Looks.", "input_schema": SCHEMA["parameters"]}
CALLING = Turn((1, 2, 3), "let me see, look()", "stop", "let me see", (ToolCall("look", {}, "call00001"),))

Body = Callable[[AsyncOpenAI, Conversation], Awaitable[Any]]


def serve(body: Body, turns: Sequence[str | Turn] = ("four",), shows_images: bool = False) -> tuple[Any, FakeSession]:
    """Run ``body`` with a client of an endpoint; its result, and the session behind the endpoint."""
    fake = FakeSession(turns, shows_images=shows_images)

    async def run() -> Any:
        endpoint = EndpointServer(OpenAIAgentConfig(agent="json:dumps"), str)
        async with endpoint.open(fake, {}) as (key, conversation):
            async with AsyncOpenAI(base_url=endpoint.base_url, api_key=key, max_retries=0) as client:
                try:
                    return await body(client, conversation)
                finally:
                    await endpoint.close()

    return asyncio.run(asyncio.wait_for(run(), 30)), fake


async def post(client: AsyncOpenAI, body: dict[str, Any], path: str = "chat/completions") -> httpx.Response:
    headers = {"authorization": f"Bearer {client.api_key}"}
    async with httpx.AsyncClient() as http:
        content = json.dumps({"model": MODEL_NAME, **body})
        return await http.post(f"{client.base_url}{path}", content=content, headers=headers)


def claude(client: AsyncOpenAI) -> anthropic.AsyncAnthropic:
    base_url = str(client.base_url).removesuffix("/v1/")
    return anthropic.AsyncAnthropic(base_url=base_url, api_key=client.api_key, max_retries=0)


def png(color: str = "red", size: tuple[int, int] = (8, 6), kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, kind)
    return file.getvalue()


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{encoded(data)}"


def chat_part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data), "detail": "low"}}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def shown(session: FakeSession) -> list[list[str]]:
    """The contents of the messages of the only trajectory: texts, and colours of images."""
    (trajectory,) = session.trajectories

    def of(part: dict[str, Any]) -> str:
        if part["type"] == "text":
            return str(part["text"])
        assert part.keys() == {"type", "image"}, "nothing of the client's form is left"
        pixel = Image.open(io.BytesIO(session.images[part["image"]])).getpixel((0, 0))
        return {(255, 0, 0): "RED", (0, 0, 255): "BLUE"}[pixel]  # type: ignore[index]

    contents = [message["content"] for message in trajectory.messages]
    return [[each] if isinstance(each, str) else [of(part) for part in each] for each in contents]


def test_a_conversation_of_openais_client_with_images_is_one_branch() -> None:
    async def body(client: AsyncOpenAI, conversation: Conversation) -> Any:
        history: list[Any] = [user(text("what is "), text("this?"), chat_part(png()), text("Say."))]
        tools: Any = [{"type": "function", "function": SCHEMA}]
        first = await client.chat.completions.create(model=MODEL_NAME, messages=history, tools=tools)
        message = first.choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": [chat_part(png("blue"))]}  # type: ignore[index]
        history += [message.model_dump(), result]
        await client.chat.completions.create(model=MODEL_NAME, messages=history, tools=tools)
        return conversation.finish(Termination.COMPLETED)

    outputs, fake = serve(body, [CALLING, "four"], shows_images=True)
    assert len(outputs) == 1 and outputs[0].metrics["endpoint_forks"] == 0
    assert shown(fake) == [["what is this?", "RED", "Say."], ["let me see"], ["BLUE"], ["four"]]
    assert len(fake.images) == 2, "an image that is sent again is the same one"


def test_a_conversation_over_the_responses_api_with_images_is_one_branch() -> None:
    async def body(client: AsyncOpenAI, conversation: Conversation) -> Any:
        parts = [
            {"type": "input_text", "text": "what?"},
            {"type": "input_image", "image_url": data_url(png()), "detail": "auto"},
        ]
        tools: Any = [{"type": "function", **SCHEMA}]
        history: list[Any] = [{"role": "user", "content": parts}]
        first = await client.responses.create(model=MODEL_NAME, input=history, tools=tools)
        history += [item.model_dump() for item in first.output]
        output = [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": data_url(png("blue"))}]
        history.append({"type": "function_call_output", "call_id": first.output[-1].call_id, "output": output})  # type: ignore[union-attr]
        await client.responses.create(model=MODEL_NAME, input=history, tools=tools)
        return conversation.finish(Termination.COMPLETED)

    outputs, fake = serve(body, [CALLING, "four"], shows_images=True)
    assert len(outputs) == 1
    assert shown(fake) == [["what?", "RED"], ["let me see"], ["see", "BLUE"], ["four"]]


def test_a_conversation_of_anthropics_client_with_images_is_one_branch() -> None:
    def block(color: str) -> dict[str, Any]:
        return {
            "type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded(png(color))},
            "cache_control": {"type": "ephemeral"},
        }  # fmt: skip

    async def body(client: AsyncOpenAI, conversation: Conversation) -> Any:
        agent, history = claude(client), [user(block("red"), text("what?"))]
        request: Any = {"model": MODEL_NAME, "max_tokens": 50, "messages": history, "tools": [CLAUDE_TOOL]}
        first = await agent.messages.create(**request)
        result = {
            "type": "tool_result",
            "tool_use_id": first.content[-1].id,  # type: ignore[union-attr]
            "content": [text("see"), block("blue")],
        }
        said = [block.model_dump(exclude_none=True) for block in first.content]
        history += [{"role": "assistant", "content": said}, user(result, text("and?"), block("red"))]
        await agent.messages.create(**request)
        return conversation.finish(Termination.COMPLETED)

    outputs, fake = serve(body, [CALLING, "four"], shows_images=True)
    assert len(outputs) == 1
    assert shown(fake) == [["RED", "what?"], ["let me see"], ["see", "BLUE"], ["and?", "RED"], ["four"]]


def test_another_image_is_another_branch() -> None:
    async def body(client: AsyncOpenAI, conversation: Conversation) -> Any:
        found = []
        for color, question in (("red", "what?"), ("blue", "what?"), ("red", "sure?")):
            messages = [user(chat_part(png(color)), text("what?")), {"role": "assistant", "content": "a"}]
            messages = messages[:1] if question == "what?" else [*messages, {"role": "user", "content": question}]
            found.append((await post(client, {"messages": messages})).json()["agentrl"])
        return [(each["branch"], each["forked"]) for each in found]

    assert serve(body, ["a", "b", "c"], shows_images=True)[0] == [(0, False), (1, True), (0, False)]


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (chat_part(b"nonsense"), "messages[0].content[0]: not an image that can be read"),
        (chat_part(png()[:45]), "messages[0].content[0]: not an image that can be read"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%"}}, "'%%' is no image"),
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "'/etc/passwd' is no image"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "is no image"),
        ({"type": "image_url", "image_url": {"url": f"{'0' * 32}-8x6.png"}}, "there is no image"),
        ({"type": "image_url", "image_url": {}}, "has neither data nor an address"),
        ({"type": "input_image", "file_id": "file-1"}, "has neither data nor an address"),
        ({"type": "image_url", "image_url": {"url": "http://example.org/x.png"}}, "set model.images.urls=true"),
        ({"type": "input_audio", "input_audio": {}}, "only texts and images are supported, found 'input_audio'"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_broken_image_is_the_clients_fault_and_fails_no_trajectory(part: dict[str, Any], reason: str) -> None:
    async def body(client: AsyncOpenAI, conversation: Conversation) -> Any:
        refused = await post(client, {"messages": [user(part)]})
        await post(client, {"messages": [user(text("never mind"))]})
        return refused, conversation.finish(Termination.COMPLETED)

    (refused, outputs), fake = serve(body, shows_images=True)
    assert refused.status_code == 400 and reason in refused.json()["error"]["message"], refused.text
    assert len(outputs) == len(fake.trajectories) == 1


def test_images_are_of_users_and_tools() -> None:
    messages = [{"role": "system", "content": [chat_part(png())]}, user(text("x"))]
    answer, _ = serve(lambda client, _: post(client, {"messages": messages}), shows_images=True)
    assert answer.status_code == 400 and "messages[0]: only messages of the user and of tools" in answer.text


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_a_model_that_takes_text_alone_says_so(path: str) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": encoded(png())}
    body: dict[str, Any] = {
        "chat/completions": {"messages": [user(chat_part(png()))]},
        "responses": {"input": [user({"type": "input_image", "image_url": data_url(png())})]},
        "messages": {"messages": [user({"type": "image", "source": source})], "max_tokens": 9},
    }[path]
    answer, fake = serve(lambda client, _: post(client, body, path))
    assert answer.status_code == 400 and "takes text alone" in answer.json()["error"]["message"], answer.text
    assert fake.trajectories == []


def test_anthropics_client_gets_its_own_error() -> None:
    async def body(client: AsyncOpenAI, _: Conversation) -> Any:
        source = {"type": "file", "file_id": "file-1"}
        with pytest.raises(anthropic.BadRequestError, match="files by id are not supported"):
            await claude(client).messages.create(
                model=MODEL_NAME, max_tokens=5, messages=[user({"type": "image", "source": source})]  # type: ignore[list-item]
            )  # fmt: skip

    serve(body, shows_images=True)


def test_more_images_than_the_run_allows_are_refused_and_nothing_is_recorded() -> None:
    class Limited(FakeSession):
        def trajectory(self, messages: Any, *, tools: Any = ()) -> Any:
            if isinstance(messages[0]["content"], list):
                raise ImageError("the conversation has 1 images, more than model.images.max_count=0")
            return super().trajectory(messages, tools=tools)

    async def body(client: AsyncOpenAI, conversation: Conversation) -> Any:
        conversation._session = conversation.images._session = Limited(["four"], shows_images=True)
        refused = await post(client, {"messages": [user(chat_part(png()))]})
        await post(client, {"messages": [user(text("never mind"))]})
        return refused, conversation.finish(Termination.COMPLETED)

    (refused, outputs), _ = serve(body)
    assert refused.status_code == 400 and "max_count=0" in refused.json()["error"]["message"]
    assert refused.json()["error"]["code"] == "invalid_image" and len(outputs) == 1


def test_addresses_are_fetched_where_the_run_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    async def fetch(url: str, **options: Any) -> bytes:
        asked.append({"url": url, **options})
        return png("blue")

    monkeypatch.setattr(images, "fetch", fetch)

    async def body(client: AsyncOpenAI, conversation: Conversation) -> Any:
        conversation.images._session.fetch_images = True
        source = {"type": "url", "url": "https://example.org/x.png"}
        await post(client, {"messages": [user({"type": "image_url", "image_url": {"url": source["url"]}})]})
        again = user({"type": "image", "source": source})
        history = [again, {"role": "assistant", "content": "four"}, again]
        answer = await post(client, {"messages": history, "max_tokens": 9}, "messages")
        return answer.status_code

    status, fake = serve(body, ["four", "five"], shows_images=True)
    assert status == 200 and shown(fake) == [["BLUE"], ["four"], ["BLUE"], ["five"]]
    (once,) = asked
    assert once["public_only"] and once["limit"] == images.MOST_BYTES


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "169.254.169.254", "10.0.0.1"])
def test_addresses_of_this_machine_and_its_network_are_never_fetched(host: str) -> None:
    async def body(client: AsyncOpenAI, conversation: Conversation) -> Any:
        conversation.images._session.fetch_images = True
        url = f"http://{host}:{client.base_url.port}/v1/models"
        return await post(client, {"messages": [user({"type": "image_url", "image_url": {"url": url}})]})

    answer, _ = serve(body, shows_images=True)
    assert answer.status_code == 400 and "is not one of the public internet" in answer.text


class Memory:
    """The images of a run, without files."""

    def __init__(self) -> None:
        self._data: dict[str, bytes] = {}

    async def put(self, found: Any) -> None:
        self._data.update(found)

    async def get(self, names: Any) -> dict[str, bytes]:
        return {name: self._data[name] for name in names}


def vision_session(path: Path, turns: list[str]) -> RolloutSession:
    chat = HFChatRenderer.from_config(ModelConfig(path=save_tiny_vision_model(path)))
    return RolloutSession(
        TrajectoryKey(0, "train", 1, 0, 0),
        {},
        SessionEnvironment(
            renderer=ChatTemplateRenderer.of(chat, None),
            limits=TrajectoryLimits(500, 1000, max_images=2),
            servers=ScriptedPolicy(chat, turns),  # type: ignore[arg-type]
            tools={},
            interactions={},
            media=Memory(),  # type: ignore[arg-type]
        ),
    )


def test_a_real_session_continues_with_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def read(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.get_ident())
        return read_image(*args, **kwargs)

    monkeypatch.setattr(session_images, "read_image", read)

    async def main() -> Any:
        conversation = Conversation(vision_session(tmp_path, ["It is red.", "Yes."]), {"temperature": 1.0})
        history = [user(text("What is this?"), chat_part(png("red", (56, 56))), text("Say."))]
        for answer in ("It is red.", "Yes."):
            (reply,) = conversation.prepare(await conversation.images.named(history))
            completion = await reply.generate()
            assert (completion.text, completion.branch) == (answer, 0)
            history += [{"role": "assistant", "content": answer}, user(chat_part(png("blue", (28, 28))), text("Now?"))]
        with pytest.raises(ImageError, match="the conversation has 3 images, more than model.images.max_count=2"):
            conversation.prepare(await conversation.images.named(history))
        return conversation

    conversation = asyncio.run(main())
    assert len(threads) == 2 and threading.get_ident() not in threads, "decoded once each, off the event loop"
    assert (conversation.rows, conversation.forks) == (1, 0)


def test_the_agent_gets_the_images_of_its_row_as_data_urls() -> None:
    async def main() -> Any:
        session = FakeSession([], shows_images=True)
        part = await session.image(png())
        prompt = [{"role": "system", "content": "brief"}, user(text("what?"), part)]
        sent = await as_sent(prompt, session)
        return part["image"], sent, await Conversation(session, {}).images.named(sent)

    name, sent, back = asyncio.run(main())
    assert sent[0] == {"role": "system", "content": "brief"}
    assert sent[1]["content"] == [text("what?"), {"type": "image_url", "image_url": {"url": data_url(png())}}]
    assert back[1]["content"][1] == {"type": "image", "image": name}


def test_images_are_counted_before_they_are_read() -> None:
    async def body(client: AsyncOpenAI, conversation: Conversation) -> Any:
        conversation.images._session.max_images = 2
        return await post(client, {"messages": [user(*[chat_part(png("red", (8, n))) for n in range(1, 4)])]})

    answer, session = serve(body, shows_images=True)
    assert answer.status_code == 400 and "3 images, more than model.images.max_count=2" in answer.text
    assert not session.images
