"""Anthropic's messages protocol, translated to and from chat completions."""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from agentrl_core.api import Message
from agentrl_loop_openai_agent.wire import Answer, ChatRequest, event, pieces

_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
_THOUGHTS = ("thinking", "redacted_thinking")
_ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 504: "timeout_error"}


class MessagesRequest(BaseModel):
    """The body of ``POST /v1/messages``; fields that are not listed have no effect on the policy."""

    model_config = ConfigDict(extra="ignore")

    model: str
    max_tokens: int = Field(ge=1)
    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: Annotated[list[str], Field(max_length=4)] | None = None
    output_config: dict[str, Any] | None = None
    stream: bool | None = False

    def chat_request(self) -> ChatRequest:
        """The same as a request for a chat completion.

        Raises:
            ValueError: a message or a tool is of an unsupported type.
        """
        choice = (self.tool_choice or {}).get("type", "auto")
        if not isinstance(choice, str):
            raise ValueError(f"tool_choice.type is {choice!r:.100}; it must be a text")
        return ChatRequest(
            model=self.model,
            messages=self._messages(),
            tools=[_function(f"tools[{index}]", tool) for index, tool in enumerate(self.tools or [])] or None,
            tool_choice={"any": "required", "tool": "required"}.get(choice, choice),
            max_tokens=self.max_tokens,
            max_completion_tokens=None,
            stop=self.stop_sequences,
            response_format=(self.output_config or {}).get("format"),
            stream=self.stream,
        )

    def _messages(self) -> list[Message]:
        messages: list[Message] = []
        if system := _text("system", self.system):
            messages.append({"role": "system", "content": system})
        for index, message in enumerate(self.messages):
            where, content = f"messages[{index}]", message.get("content")
            if message.get("role") == "assistant":
                messages.append(_assistant(where, content))
            elif message.get("role") == "user":
                messages += _user(where, content)
            else:
                raise ValueError(f"{where}.role is {message.get('role')!r}; allowed are user and assistant")
        return messages


def _function(where: str, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom" or "name" not in tool:
        raise ValueError(f"{where}: only the agent's own tools are supported, with name and input_schema")
    function = {"name": tool["name"], "description": tool.get("description", "")}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema") or {}}}


def _blocks(where: str, content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise ValueError(f"{where}.content: expected text or a list of blocks")
    return content


def _text(where: str, content: Any) -> str:
    """Text of a system prompt or of an assistant."""
    return "".join(block["text"] for block in _shown(where, content, ("text",)))


def _shown(where: str, content: Any, kinds: Sequence[str] = ("text", "image")) -> list[dict[str, Any]]:
    """Blocks of a user or of a tool's result."""
    blocks = _blocks(where, content or "")
    for block in blocks:
        if block.get("type") not in kinds or (block["type"] == "text" and not isinstance(block.get("text"), str)):
            raise ValueError(f"{where}: blocks of type {block.get('type')!r} are not supported")
    return blocks


def _assistant(where: str, content: Any) -> Message:
    blocks = [block for block in _blocks(where, content) if block.get("type") not in _THOUGHTS]
    calls = [block for block in blocks if block.get("type") == "tool_use"]
    message: Message = {"role": "assistant", "content": _text(where, [each for each in blocks if each not in calls])}
    if calls:
        message["tool_calls"] = [
            {
                "id": call.get("id"),
                "type": "function",
                "function": {"name": call.get("name"), "arguments": json.dumps(call.get("input") or {})},
            }
            for call in calls
        ]
    return message


def _user(where: str, content: Any) -> list[Message]:
    """Results of tools, each in a message of its own, before the text."""
    blocks = _blocks(where, content)
    results = [block for block in blocks if block.get("type") == "tool_result"]
    messages: list[Message] = [
        {"role": "tool", "tool_call_id": each.get("tool_use_id"), "content": _shown(where, each.get("content"))}
        for each in results
    ]
    if texts := [block for block in blocks if block not in results]:
        messages.append({"role": "user", "content": _shown(where, texts)})
    return messages


def message_body(answer: Answer) -> dict[str, Any]:
    """The whole answer as a message."""
    chat = answer.body()
    said, usage = chat["choices"][0]["message"], chat["usage"]
    content: list[dict[str, Any]] = []
    if said["content"] or not said.get("tool_calls"):
        content.append({"type": "text", "text": said["content"]})
    for call in said.get("tool_calls", []):
        function = call["function"]
        arguments = json.loads(function["arguments"])
        content.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    return {
        "id": chat["id"],
        "type": "message",
        "role": "assistant",
        "model": chat["model"],
        "content": content,
        "stop_reason": "stop_sequence" if answer.first.stop is not None else _STOP_REASONS[answer.first.finish_reason],
        "stop_sequence": answer.first.stop,
        "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
        "agentrl": chat["agentrl"],
    }


def message_events(answer: Answer) -> Iterator[str]:
    """The answer as a client that streams reads it."""
    for body in _events(message_body(answer)):
        yield event(body, body["type"])


def _events(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    usage = message["usage"]
    begun = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": {**usage, "output_tokens": 0}}
    yield {"type": "message_start", "message": {**message, **begun}}
    for index, block in enumerate(message["content"]):
        if block["type"] == "text":
            empty, kind, name, text = {"text": ""}, "text_delta", "text", block["text"]
        else:
            empty, kind, name, text = {"input": {}}, "input_json_delta", "partial_json", json.dumps(block["input"])
        yield {"type": "content_block_start", "index": index, "content_block": {**block, **empty}}
        for piece in pieces(text):
            yield {"type": "content_block_delta", "index": index, "delta": {"type": kind, name: piece}}
        yield {"type": "content_block_stop", "index": index}
    ended = {key: message[key] for key in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": ended, "usage": {"output_tokens": usage["output_tokens"]}}
    yield {"type": "message_stop"}


def message_error(status: int, text: str) -> dict[str, Any]:
    """An error as clients of this protocol expect it."""
    kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": text}}
