"""The Hermes format: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, as many as the model likes."""

import json
import re
from typing import Any

from agentrl_core.api import ParsedText, ToolCall, ToolParser, ToolParserContext
from agentrl_tool_parsers.config import HermesConfig

CALL, CALL_END = "<tool_call>", "</tool_call>"
THINK, THINK_END = "<think>", "</think>"

_OPENING = re.compile(f"{CALL}|{THINK}")
_SPACE = re.compile(r"\s*")
_KEYS = {"name", "arguments"}
_WINDOW = 1024
_LONGEST_LITERAL = 16


class HermesParser(ToolParser):
    """Finds Hermes calls.

    Every ``<tool_call>`` outside the JSON of a call and outside reasoning yields exactly one call or one error; the
    text between them is the content. A text without the tag is returned as it is.

    The JSON ends where a JSON decoder says so, thus ``</tool_call>`` may occur in its strings. Literal line breaks in
    strings are accepted, because models that write code produce them. ``arguments`` may be an object, a string that
    holds one, or absent. A call without its closing tag is an error: it may have been cut off.

    ``<think>…</think>`` stays in the content, and a call in it is a thought, not a call. Reasoning that never ends
    hides nothing: after an unclosed ``<think>`` calls are calls.
    """

    def __init__(self, config: HermesConfig, context: ToolParserContext) -> None:
        super().__init__(config, context)
        self._starts_in_think = config.starts_in_think
        self._decode = json.JSONDecoder(strict=False, parse_constant=_no_constant).raw_decode

    def parse(self, text: str) -> ParsedText:
        if CALL not in text:
            return ParsedText(text)
        pieces: list[str] = []
        calls: list[ToolCall] = []
        errors: list[str] = []
        start = 0
        position = max(text.find(THINK_END), 0) if self._starts_in_think else 0
        last_think_end = text.rfind(THINK_END)
        while opening := _OPENING.search(text, position):
            position = opening.end()
            if opening.group() == THINK:
                if position <= last_think_end:
                    position = text.index(THINK_END, position) + len(THINK_END)
                continue
            pieces.append(text[start : opening.start()])
            call, position = self._call(text, position)
            if isinstance(call, ToolCall):
                calls.append(call)
            else:
                errors.append(call)
            start = position
        if not calls and not errors:
            return ParsedText(text)
        pieces.append(text[start:])
        return ParsedText("\n".join(piece for piece in map(str.strip, pieces) if piece), calls, errors)

    def _call(self, text: str, start: int) -> tuple[ToolCall | str, int]:
        """The call, or what is wrong with it, that begins at ``start``; and where the text goes on."""
        begin = _skip_space(text, start)
        try:
            value, json_end = self._value_at(text, begin)
        except (ValueError, RecursionError) as error:
            end, closed = _resume(text, begin)
            return _error(_reason(error, start) if closed else f"no {CALL_END}; it is cut off"), end
        tag = _skip_space(text, json_end)
        if not text.startswith(CALL_END, tag):
            end, closed = _resume(text, json_end)
            return _error("text after the JSON object" if closed else f"no {CALL_END} after the JSON object"), end
        try:
            call = self._checked(value)
            if "\\u" in text[begin:json_end]:
                _check_unicode(call)
        except (ValueError, RecursionError) as error:
            return _error(_reason(error, 0)), tag + len(CALL_END)
        return call, tag + len(CALL_END)

    def _value_at(self, text: str, begin: int) -> tuple[Any, int]:
        """The JSON value at ``begin``, and its end.

        Decoded in windows that grow until the value, or its error, lies well inside: a decoder's error counts the
        lines of everything before it, which takes quadratic time for a text of many bad calls.
        """
        size = _WINDOW
        while True:
            window = text[begin : begin + size]
            complete = begin + size >= len(text)
            try:
                value, end = self._decode(window)
            except json.JSONDecodeError as error:
                if complete or (error.pos < size - _LONGEST_LITERAL and not error.msg.startswith("Unterminated")):
                    error.pos += begin
                    raise
            else:
                if complete or end < size:
                    return value, begin + end
            size *= 8

    def _checked(self, value: Any) -> ToolCall:
        if not isinstance(value, dict):
            raise ValueError(f"expected a JSON object, not {_json_type(value)}")
        name, arguments = value.get("name"), value.get("arguments", {})
        if not isinstance(name, str) or not name:
            raise ValueError('"name" is missing' if "name" not in value else '"name" must be the name of a tool')
        if not value.keys() <= _KEYS:
            unknown = next(key for key in value if key not in _KEYS)
            raise ValueError(f'unknown key {unknown[:40]!r}; allowed are "name" and "arguments"')
        if isinstance(arguments, str):
            arguments = self._object_in(arguments)
        if not isinstance(arguments, dict):
            raise ValueError(f'"arguments" must be a JSON object, not {_json_type(arguments)}')
        return ToolCall(name, arguments)

    def _object_in(self, text: str) -> Any:
        try:
            value, end = self._decode(text, _skip_space(text, 0))
        except (ValueError, RecursionError) as error:
            raise ValueError('"arguments" is a string that holds no JSON object') from error
        if text[end:].strip():
            raise ValueError('"arguments" is a string with text after its JSON object')
        return value


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _resume(text: str, position: int) -> tuple[int, bool]:
    """Where to go on after a bad call, and whether it was closed: at its end tag, the next call, or the end."""
    following = text.find(CALL, position)
    limit = len(text) if following < 0 else following
    end = text.find(CALL_END, position, limit)
    return (limit, False) if end < 0 else (end + len(CALL_END), True)


def _error(reason: str) -> str:
    return f"Error: invalid tool call: {reason}"


def _reason(error: Exception, start: int) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg} at character {error.pos - start}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _check_unicode(call: ToolCall) -> None:
    """Half a surrogate pair (``\\ud83d`` alone) is a str that no tokenizer can encode."""
    try:
        json.dumps(call.as_message(), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("half a surrogate pair in a \\u escape") from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    return {list: "an array", dict: "an object", str: "a string", bool: "a boolean"}.get(type(value), "a number")
