"""The chat-completions protocol, as far as it is spoken here."""

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.validators import validator_for
from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl_core.engine_kit.images import shown_by
from agentrl_loop_openai_agent.conversation import Completion

Decode = Callable[[list[int]], str]

CHUNK_CHARACTERS = 64
"""Characters of one streamed piece of text."""


Zero = Annotated[float | None, Field(ge=0, le=0)]


class ChatRequest(BaseModel):
    """The body of ``POST /v1/chat/completions``. What would change the answer in an unsupported way is refused."""

    model_config = ConfigDict(extra="forbid")

    model: str
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    n: int | None = Field(default=1, ge=1)
    logprobs: bool | None = False
    # Clients send these with the values that change nothing.
    top_logprobs: Zero = None
    frequency_penalty: Zero = None
    presence_penalty: Zero = None
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    logit_bias: Annotated[dict[str, float] | None, Field(max_length=0)] = None
    modalities: list[Literal["text"]] | None = None

    response_format: dict[str, Any] | None = None
    # These cannot be enforced; see `unenforced`.
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Sampling belongs to the run, so that log-probs can be trained; these are accepted and without effect.
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    # About the caller, not about the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _messages_and_tools_are_well_formed(self) -> "ChatRequest":
        for index, message in enumerate(self.messages):
            _check_message(f"messages[{index}]", message)
        for index, tool in enumerate(self.tools or []):
            function = tool.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise ValueError(f"tools[{index}]: expected {{'type': 'function', 'function': {{'name': …}}}}")
        return self

    def chat_request(self) -> "ChatRequest":
        """Itself; requests of other protocols are translated into this one."""
        return self

    @property
    def stops(self) -> list[str]:
        """Texts that end the turn."""
        return [stop for stop in ([self.stop] if isinstance(self.stop, str) else self.stop or []) if stop]

    @property
    def _format(self) -> Any:
        return (self.response_format or {}).get("type", "text")

    def json_schema(self) -> str | None:
        """JSON text of the schema that the answer is to fit; None where any text will do.

        Raises:
            ValueError: there is no schema in ``response_format``, or it is not a valid one.
        """
        if self._format == "text":
            return None
        if self._format == "json_object":
            return '{"type": "object"}'
        schema = (self.response_format or {}).get("json_schema")
        # Chat completions have the schema one level deeper than the other protocols.
        schema = (schema if isinstance(schema, dict) else self.response_format or {}).get("schema")
        if self._format != "json_schema" or not isinstance(schema, dict):
            raise ValueError(
                "response_format: expected {'type': 'json_schema', 'json_schema': {'name': …, 'schema': {…}}}, or the "
                "type json_object or text"
            )
        try:
            validator_for(schema, Draft202012Validator).check_schema(schema)
        except (SchemaError, RecursionError) as error:
            where = getattr(error, "json_path", "$")
            raise ValueError(f"response_format: {where} of the schema: {getattr(error, 'message', error)}") from error
        return json.dumps(schema)

    def unenforced(self, capabilities: Collection[str]) -> dict[str, str]:
        """Fields that ask for something that only the policy itself can give, or that the run's config decides, and
        why. ``capabilities`` are the engine's."""
        asked: dict[str, str] = {}
        if self.tool_choice not in (None, "auto", "none"):
            asked["tool_choice"] = "no engine constrains what the policy samples to a call"
        if self._format != "text" and self.schemas:
            asked["response_format"] = "under a schema the policy could not call the tools of the request"
        elif self._format != "text" and "json_schema" not in capabilities:
            asked["response_format"] = "this run's engine has no capability 'json_schema'"
        if self.chat_template_kwargs:
            asked["chat_template_kwargs"] = "model.chat_template_kwargs of the run decides"
        return asked

    @property
    def limit(self) -> int | None:
        """Most tokens to sample; None leaves it to the run."""
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min(limits, default=None)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools that the model is shown."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def usage_wanted(self) -> bool:
        """A stream is to end with the usage."""
        return bool((self.stream_options or {}).get("include_usage"))


def _check_message(where: str, message: dict[str, Any]) -> None:
    if not isinstance(message.get("role"), str):
        raise ValueError(f"{where} has no role")
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    if not isinstance(content, str | list | None):
        raise ValueError(f"{where}.content: expected a text or a list of parts")
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if shown_by(part) is not None and message["role"] not in ("user", "tool"):
            raise ValueError(f"{where}: only messages of the user and of tools can show images")
        if shown_by(part) is None and (kind != "text" or not isinstance(part.get("text"), str)):
            raise ValueError(f"{where}.content[{number}]: only texts and images are supported, found {kind!r:.100}")
    calls = message.get("tool_calls") or []
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or not isinstance(function.get("arguments", ""), str | dict)
        ):
            raise ValueError(
                f"{where}.tool_calls: expected [{{'id': …, 'function': {{'name': text, 'arguments': JSON text}}}}]"
            )


def error_body(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    """An error as clients of this protocol expect it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def models_body(model: str) -> dict[str, Any]:
    """The answer to ``GET /v1/models``."""
    return {"object": "list", "data": [{"id": model, "object": "model", "created": 0, "owned_by": "agentrl"}]}


def pieces(text: str) -> Iterator[str]:
    """The text in the pieces in which it is streamed."""
    for start in range(0, len(text), CHUNK_CHARACTERS):
        yield text[start : start + CHUNK_CHARACTERS]


def event(body: Mapping[str, Any], name: str = "") -> str:
    """A server-sent event."""
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


class Choice:
    """One completion as a choice of an answer.

    Args:
        index: of the choice.
        completion: what the policy said.
        logprobs: of the sampled tokens, in the protocol's form; None where they were not asked for.
    """

    def __init__(self, index: int, completion: Completion, logprobs: list[dict[str, Any]] | None = None) -> None:
        self.index = index
        self.logprobs = logprobs
        self.stop = completion.stop
        self._turn = completion.turn
        self._text = completion.text
        self._prompt_tokens = completion.prompt_tokens
        self._calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in self._turn.tool_calls
        ]
        self.own = {"branch": completion.branch, "forked": completion.forked, "replayed": completion.replayed}

    @property
    def finish_reason(self) -> str:
        """``stop``, ``tool_calls`` or ``length``."""
        if self._turn.finish_reason == "length":
            return "length"
        return "tool_calls" if self._calls else "stop"

    @property
    def tokens(self) -> tuple[int, int]:
        """Of the prompt and of the answer."""
        return self._prompt_tokens, len(self._turn.token_ids)

    def body(self) -> dict[str, Any]:
        """The whole choice."""
        message: dict[str, Any] = {"role": "assistant", "content": self._text, "refusal": None}
        if self._calls:
            message["tool_calls"] = self._calls
        return self._filled({"message": message}, self.finish_reason, self.logprobs)

    def deltas(self) -> Iterator[dict[str, Any]]:
        """The choice in the pieces in which it is streamed; the last one has the log-probs."""
        yield self._filled({"delta": {"role": "assistant", "content": ""}})
        for piece in pieces(self._text):
            yield self._filled({"delta": {"content": piece}})
        for index, call in enumerate(self._calls):
            yield self._filled({"delta": {"tool_calls": [{"index": index, **call}]}})
        yield self._filled({"delta": {}}, self.finish_reason, self.logprobs)

    def _filled(
        self, said: dict[str, Any], finish_reason: str | None = None, logprobs: list[dict[str, Any]] | None = None
    ) -> dict[str, Any]:
        content = None if logprobs is None else {"content": logprobs, "refusal": None}
        return {"index": self.index, **said, "logprobs": content, "finish_reason": finish_reason, "agentrl": self.own}


class Answer:
    """The answer to one request, in one piece or as chunks."""

    def __init__(self, identifier: str, model: str, choices: Sequence[Choice]) -> None:
        self._head = {"id": identifier, "created": int(time.time()), "model": model}
        self.choices = choices

    @property
    def first(self) -> Choice:
        """The only choice of a protocol that has no more."""
        return self.choices[0]

    @property
    def usage(self) -> dict[str, int]:
        """Tokens of the prompt, of all choices, and of both."""
        prompt, completion = self.first.tokens[0], sum(choice.tokens[1] for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def body(self) -> dict[str, Any]:
        """The whole answer; ``agentrl`` says to which branch of the conversation the first choice belongs."""
        head = {**self._head, "object": "chat.completion", "agentrl": self.first.own}
        return {**head, "choices": [choice.body() for choice in self.choices], "usage": self.usage}

    def events(self, usage: bool) -> Iterator[str]:
        """The answer as a client that streams reads it."""
        head = {**self._head, "object": "chat.completion.chunk"}
        for choice in self.choices:
            for delta in choice.deltas():
                yield event({**head, "choices": [delta], "agentrl": choice.own})
        if usage:
            yield event({**head, "choices": [], "usage": self.usage})
        yield "data: [DONE]\n\n"


def logprobs_of(ids: Sequence[int], values: Sequence[float], decode: Decode) -> list[dict[str, Any]]:
    """The log-probability of each sampled token; ``bytes`` is null where a token is only part of a character."""
    texts = [decode([id_]) for id_ in ids]
    return [
        {
            "token": text,
            "logprob": value,
            "bytes": None if "\ufffd" in text else list(text.encode()),
            "top_logprobs": [],
        }
        for text, value in zip(texts, values, strict=True)
    ]
