"""Harmony, the format of gpt-oss, read by its control tokens.

A turn is a series of messages, each with a channel and perhaps a recipient. Only a control token begins or ends a part
of a message: the same characters in its text are text.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl_core.api import (
    Conversation,
    Message,
    ParsedTurn,
    Rendered,
    Renderer,
    RendererContext,
    TemplateError,
    ToolCall,
)

_NAMES = ("start", "end", "message", "channel", "constrain", "call", "return")
_RECIPIENT = re.compile(r"(?:^|(?<=\s))to=(\S+)")
_MOST_ERRORS = 16


@dataclass
class _Part:
    """A message of a turn, or text outside one: ids of header and body, and its place among the turn's ids."""

    start: int
    end: int = 0
    header: list[int] = field(default_factory=list)
    body: list[int] | None = None


class HarmonyRenderer(Renderer):
    """Renders with the chat template. ``analysis`` becomes the message's ``thinking``, which the template keeps until
    the final answer."""

    def __init__(self, config: Any, context: RendererContext) -> None:
        super().__init__(config, context)
        if context.base is None:
            raise TemplateError("harmony needs the renderer of the model's chat template in its context")
        self._base = context.base
        ids = {name: context.tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in _NAMES}
        if missing := [name for name, id in ids.items() if id in (None, context.tokenizer.unk_token_id)]:
            raise TemplateError(
                f"rollout.renderer: harmony is the format of gpt-oss, but the tokenizer of {context.model_path} has no "
                f"<|{'|>, <|'.join(missing)}|>. Choose chat_template"
            )
        self._ids: dict[str, int] = ids
        if open_ends := [name for name in ("call", "return") if ids[name] not in context.base.stop_token_ids]:
            raise TemplateError(
                f"rollout.renderer: generation_config.json of {context.model_path} must name "
                f"{' and '.join(str(ids[name]) for name in open_ends)} in eos_token_id: <|call|> and <|return|> end "
                "a turn"
            )

    @property
    def stop_token_ids(self) -> Sequence[int]:
        return self._base.stop_token_ids

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), *, generation_prompt: bool = False
    ) -> Rendered:
        return self._base.render(messages, tools, generation_prompt=generation_prompt)

    def lengths(self, prompts: Iterable[tuple[Sequence[Message], Sequence[dict[str, Any]]]]) -> list[int]:
        return self._base.lengths(prompts)

    def check(self, so_far: Conversation) -> bool:
        return self._base.check(so_far)

    def bridge(
        self, so_far: Conversation, added: Sequence[Message], *, generation_prompt: bool = True
    ) -> Rendered | None:
        found = self._base.bridge(so_far, added, generation_prompt=generation_prompt)
        if found is not None or so_far.turn_ids[-1:] != [self._ids["return"]]:
            return found
        # The template ends an answer in the history with <|end|>, where the policy sampled <|return|>. That stays.
        *before, turn = so_far.path
        ended = replace(
            turn, ids=[*turn.ids[:-1], self._ids["end"]], text=turn.text.removesuffix("<|return|>") + "<|end|>"
        )
        return self._base.bridge(replace(so_far, path=[*before, ended]), added, generation_prompt=generation_prompt)

    def parse(self, ids: Sequence[int], tools: Sequence[dict[str, Any]]) -> ParsedTurn:
        text = self.chat.decode(ids[:-1] if ids and ids[-1] in self.stop_token_ids else ids)
        content: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        errors: list[str] = []
        spans: list[tuple[int, int]] = []
        for part in self._parts(ids):
            found = self._read(part)
            if isinstance(found, ToolCall):
                calls.append(found)
            elif isinstance(found, tuple):
                (thoughts if found[0] == "analysis" else content).append(found[1])
            elif len(errors) < _MOST_ERRORS:
                errors.append(f"Error: invalid tool call: {found}")
                place = (len(self.chat.decode(ids[:end])) for end in (part.start, part.end))
                start, end = (min(each, len(text)) for each in place)
                spans.append((start, max(start, end)))
        said, reasoning = "".join(content), "\n".join(thoughts)
        thinking = reasoning
        if calls and said and reasoning:
            # The template takes one of the two beside a call.
            said, thinking = "", f"{reasoning}\n{said}"
        return ParsedTurn(said, calls, errors, reasoning, spans, text, {"thinking": thinking} if thinking else {})

    def _parts(self, ids: Sequence[int]) -> Iterator[_Part]:
        names = {id: name for name, id in self._ids.items()}
        part = _Part(0)
        for at, id in enumerate(ids):
            name = names.get(id)
            if name == "start" or name in ("end", "call", "return"):
                part.end = at
                if part.header or part.body is not None:
                    yield part
                part = _Part(at)
                if name == "start":
                    part.header.append(id)
            elif name == "message" and part.body is None:
                part.body = []
            elif id not in self.stop_token_ids or at + 1 < len(ids):
                (part.header if part.body is None else part.body).append(id)
        part.end = len(ids)
        if part.header or part.body is not None:
            yield part

    def _read(self, part: _Part) -> ToolCall | tuple[str, str] | str:
        """A call, a text with its channel, or what is wrong."""
        channel, header = "", self.chat.decode(part.header)
        opened = [self._ids[name] in part.header for name in ("start", "channel", "constrain")]
        if self._ids["channel"] in part.header:
            words = self.chat.decode(part.header[part.header.index(self._ids["channel"]) + 1 :]).split(maxsplit=1)
            channel = words[0] if words else ""
        recipient = _RECIPIENT.search(header.replace("<|", " <|"))
        if part.body is None:
            wrong = "no <|message|> after the header; it is cut off"
            return wrong if any(opened) or recipient else ("", header)
        body = self.chat.decode(part.body)
        if recipient is None:
            return channel, body
        name = recipient[1].removeprefix("functions.")
        try:
            arguments = json.loads(body)
        except (ValueError, RecursionError) as error:
            return f"the arguments of {name!r} are no JSON ({error})"
        if not name or not isinstance(arguments, dict):
            return "a call needs the name of a tool, and a JSON object of arguments"
        return ToolCall(name, arguments)
