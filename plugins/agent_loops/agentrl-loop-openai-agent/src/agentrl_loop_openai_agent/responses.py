"""The responses protocol, translated to and from chat completions. Stateless: each request brings the whole history."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from agentrl_core.api import Message
from agentrl_loop_openai_agent.wire import Answer, ChatRequest, Zero, event, pieces

LOGPROBS = "message.output_text.logprobs"
"""What a request includes to get log-probs."""

_TEXT_PARTS = ("input_text", "output_text", "text")


class ResponsesRequest(BaseModel):
    """The body of ``POST /v1/responses``; fields that are not listed are about the caller and are ignored."""

    model_config = ConfigDict(extra="ignore")

    model: str
    input: Annotated[str | list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    include: list[str] | None = None
    top_logprobs: Zero = None
    text: dict[str, Any] | None = None
    stream: bool | None = False
    # The endpoint keeps no responses.
    previous_response_id: None = None
    conversation: None = None
    background: Literal[False] | None = None

    def chat_request(self) -> ChatRequest:
        """The same as a request for a chat completion.

        Raises:
            ValueError: an item of the input or a tool is of an unsupported type.
        """
        tools = [
            {"type": "function", "function": {key: tool[key] for key in _FUNCTION_KEYS if tool.get(key) is not None}}
            for tool in self.tools or []
        ]
        return ChatRequest(
            model=self.model,
            messages=self._messages(),
            tools=tools or None,
            tool_choice=self.tool_choice,
            max_tokens=None,
            max_completion_tokens=self.max_output_tokens,
            logprobs=LOGPROBS in (self.include or ()),
            response_format=(self.text or {}).get("format"),
            stream=self.stream,
        )

    def _messages(self) -> list[Message]:
        messages: list[Message] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        for index, item in enumerate(items):
            kind = item.get("type") or "message"
            if kind == "message":
                messages.append({"role": item.get("role"), "content": _content(item.get("content"))})
            elif kind == "function_call":
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
            elif kind == "function_call_output":
                content = _content(item.get("output"))
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
            elif kind != "reasoning":
                raise ValueError(f"input[{index}]: items of type {kind!r} are not supported")
        return messages


_FUNCTION_KEYS = ("name", "description", "parameters", "strict")


def response_body(answer: Answer) -> dict[str, Any]:
    """The whole answer as a response object."""
    chat = answer.body()
    message, usage = chat["choices"][0]["message"], chat["usage"]
    output: list[dict[str, Any]] = []
    if message["content"] or not message.get("tool_calls"):
        text = {"type": "output_text", "text": message["content"], "annotations": []}
        if answer.first.logprobs is not None:
            text["logprobs"] = answer.first.logprobs
        output.append({
            "type": "message", "id": f"msg_{chat['id']}", "status": "completed", "role": "assistant", "content": [text],
        })  # fmt: skip
    for call in message.get("tool_calls", []):
        output.append({
            "type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"], "status": "completed",
            **call["function"],
        })  # fmt: skip
    is_cut = answer.first.finish_reason == "length"
    return {
        "id": chat["id"],
        "object": "response",
        "created_at": chat["created"],
        "model": chat["model"],
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
        "agentrl": chat["agentrl"],
    }


def response_events(answer: Answer) -> Iterator[str]:
    """The answer as a client that streams reads it; each event carries its number."""
    for number, body in enumerate(_events(response_body(answer))):
        yield event({**body, "sequence_number": number}, body["type"])


def _events(response: dict[str, Any]) -> Iterator[dict[str, Any]]:
    begun = {**response, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(response["output"]):
        place = {"item_id": item["id"], "output_index": index}
        empty = {"content": []} if item["type"] == "message" else {"arguments": ""}
        begun_item = {**item, **empty, "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": begun_item}
        yield from _text_events(item, place) if item["type"] == "message" else _call_events(item, place)
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{response['status']}", "response": response}


def _text_events(item: dict[str, Any], place: dict[str, Any]) -> Iterator[dict[str, Any]]:
    part, place = item["content"][0], {**place, "content_index": 0}
    yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
    for piece in pieces(part["text"]):
        yield {"type": "response.output_text.delta", **place, "delta": piece, "logprobs": []}
    logprobs = part.get("logprobs", [])
    yield {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": logprobs}
    yield {"type": "response.content_part.done", **place, "part": part}


def _call_events(item: dict[str, Any], place: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for piece in pieces(item["arguments"]):
        yield {"type": "response.function_call_arguments.delta", **place, "delta": piece}
    whole = {"name": item["name"], "arguments": item["arguments"]}
    yield {"type": "response.function_call_arguments.done", **place, **whole}


def _content(content: Any) -> Any:
    """Parts of the chat protocol; what is no text is left for the check of chat messages."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part.get("text")}
        if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS
        else part
        for part in content
    ]
