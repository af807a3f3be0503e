"""One parser for every family that marks calls in the text: a table says how each one does (``formats.py``).

transformers reads the same from a table in the tokenizer's configuration (``utils/chat_parsing``, seen in 5.19), and
the tables here say much the same. Its reader isn't used: one malformed call raises ValueError for the whole turn, so
that the good calls next to it are lost, and the error has no place; ``</tool_call>`` in a JSON string ends the call; of
the texts between calls only the last is kept; and 400 good calls, 24,000 characters, take 2.6 s, twice as many eight
times that.

A text is read from left to right. Every opening outside reasoning and outside a call yields its calls or an error. A
good call is read once; behind a bad one reading continues at the next opening, and after 16 bad ones it ends with an
error that says so. Time is thus linear in the length of the text, whatever is in it. Nothing is evaluated.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from agentrl_core.api import ParsedText, ToolCall, ToolParser
from agentrl_tool_parsers.values import after, read_json, read_literal, skip_space, typed

MOST_ERRORS = 16
"""Bad calls of one turn that are read. A last message says that there was more."""

Tools = Mapping[str, Mapping[str, Any]]
"""The JSON Schema of the parameters of each tool."""


class NotACallError(Exception):
    """In a format without marks: what looked like a call is content, up to ``end`` if that is known."""

    def __init__(self, end: int = 0) -> None:
        self.end = end


@dataclass(frozen=True)
class Body:
    """What follows an opening.

    Args:
        text: the whole turn.
        start: where the body begins.
        limit: where the next call opens, or the text ends.
        name: of the tool, from the header; empty: the body says it.
        tools: the tools of the turn.
        marked: the opening is the format's own mark, not merely a bracket.
    """

    text: str
    start: int
    limit: int
    name: str
    tools: Tools
    marked: bool


Found = list[ToolCall | str]
"""The calls of one opening, in order, with a message in the place of each that is malformed."""
Read = Callable[[Body], tuple[Found, int]]


@dataclass(frozen=True)
class Format:
    """How a family of models writes calls.

    Args:
        opening: regex of the mark at which a call, or a list of calls, begins.
        read: reads the body: the calls, and where it ends. Raises ValueError with what is wrong.
        header: regex between opening and body, whose group ``name`` is the tool's name.
        closing: must follow the body; empty: the body ends by itself.
        tail: regex of what may stand between body and closing.
        section: regexes of what opens and closes a series of calls.
        reasoning: what opens and closes reasoning.
    """

    opening: str
    read: Read
    header: str = ""
    closing: str = ""
    tail: str = r"\s*"
    section: tuple[str, str] | None = None
    reasoning: tuple[str, str] = ("<think>", "</think>")


class BlockParser(ToolParser):
    """Finds the calls of one :class:`Format`.

    The content is the text outside calls. Reasoning stays in it as written, where chat templates of the family read it
    out of there, and a call in reasoning is a thought, not a call. Reasoning that is never closed hides nothing: after
    an unclosed ``<think>`` calls are calls. Where the first tag of reasoning closes it, the prompt had opened it, and
    everything before is reasoning.
    """

    format: ClassVar[Format]
    _marks: ClassVar[re.Pattern[str]]
    _unnamed_marks: ClassVar[re.Pattern[str]]
    _openings: ClassVar[re.Pattern[str]]
    _header: ClassVar[re.Pattern[str]]
    _tail: ClassVar[re.Pattern[str]]
    _section_end: ClassVar[re.Pattern[str] | None]

    def __init_subclass__(cls) -> None:
        form = cls.__dict__.get("format")
        if form is None:
            return
        section, section_end = form.section or ("", "")
        think, think_end = map(re.escape, form.reasoning)
        openings = [form.opening, *([section] if section else [])]
        named = f"(?P<call>{form.opening})|(?P<section>{section or '(?!)'})"
        cls._marks = re.compile(f"{named}|(?P<think>{think})|(?P<think_end>{think_end})")
        # Python tries named groups at each character, and skips to a first letter without them.
        cls._unnamed_marks = re.compile("|".join([*openings, think, think_end]))
        cls._openings = re.compile("|".join(openings))
        cls._header, cls._tail = re.compile(form.header), re.compile(form.tail)
        cls._section_end = re.compile(rf"\s*{section_end}") if section_end else None

    def parse(self, text: str) -> ParsedText:
        return self.parse_turn(text, [])

    def parse_turn(self, text: str, tools: Sequence[dict[str, Any]]) -> ParsedText:
        turn = Turn(text)
        think_end = self.format.reasoning[1]
        last_think_end = text.rfind(think_end)
        schemas: Tools | None = None
        position, reasoned = 0, False
        while mark := self._next_mark(text, position):
            if turn.failures >= MOST_ERRORS:
                turn.unread = mark.start()
                break
            position = mark.end()
            if mark["think"] is not None:
                if position <= last_think_end:
                    end = text.index(think_end, position)
                    turn.reasoning.append(text[position:end].strip())
                    position, reasoned = end + len(think_end), True
            elif mark["think_end"] is not None:
                if not reasoned:
                    turn = Turn(text, reasoning=[text[: mark.start()].strip()])
                reasoned = True
            elif mark["section"] is not None:
                position = skip_space(text, position)
                if self._openings.match(text, position):
                    turn.take([], mark.start(), position)
                else:
                    position = self._resume(text, position)[0]
                    turn.take([f"no call after {mark.group().strip()}"], mark.start(), position)
            else:
                if schemas is None:
                    schemas = _parameters(tools)
                try:
                    found, end = self._block(text, mark, schemas)
                except NotACallError as content:
                    position = max(position, content.end)
                    turn.failures += not content.end
                    continue
                turn.take(found, mark.start(), end)
                position = end
        return turn.parsed()

    def _next_mark(self, text: str, position: int) -> re.Match[str] | None:
        found = self._unnamed_marks.search(text, position)
        return self._marks.match(text, found.start()) if found else None

    def _block(self, text: str, mark: re.Match[str], tools: Tools) -> tuple[Found, int]:
        """What the call that opens at ``mark`` is, and where the text goes on."""
        form = self.format
        begin = start = skip_space(text, mark.end())
        limit = self._next(text, start)
        try:
            header = self._header.match(text, start)
            if header is None:
                raise ValueError("no name of a tool")
            start = header.end()
            name = header["name"] if form.header else None
            body = Body(text, start, limit, name or "", tools, bool(mark.group().strip()))
            found, end = form.read(body)
        except (ValueError, RecursionError) as error:
            end, closed = self._resume(text, begin)
            cut = f"no {form.closing}; it is cut off"
            return [reason(error, begin) if closed or not form.closing else cut], end
        tail = self._tail.match(text, end)
        after_tail = tail.end() if tail else end
        if form.closing and not text.startswith(form.closing, after_tail):
            end, closed = self._resume(text, end)
            return ["text between the call and its end" if closed else f"no {form.closing} after the call"], end
        end = after_tail + len(form.closing) if form.closing else end
        closes = self._section_end.match(text, end) if self._section_end else None
        return found, closes.end() if closes else end

    def _resume(self, text: str, position: int) -> tuple[int, bool]:
        """Where to go on after a bad call, and whether it was closed: at its closing, the next call, or the end."""
        limit = self._next(text, position)
        closing = self.format.closing
        end = text.find(closing, position, limit) if closing else -1
        return (limit, False) if end < 0 else (end + len(closing), True)

    def _next(self, text: str, position: int) -> int:
        """Where the next call opens: one without a mark is not the one whose body begins at ``position``."""
        opens = self._openings.search(text, position)
        if opens and opens.end() == position:
            opens = self._openings.search(text, position + 1)
        return opens.start() if opens else len(text)


@dataclass
class Turn:
    """What was found so far in a text."""

    text: str
    start: int = 0
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    errors: list[tuple[str, int, int]] = field(default_factory=list)
    failures: int = 0
    unread: int = -1

    def take(self, found: Found, start: int, end: int) -> None:
        """Note what stands from ``start`` to ``end``; the text before it is content."""
        self.content.append(self.text[self.start : start])
        self.start = end
        self.failures += any(isinstance(each, str) for each in found)
        for each in found:
            if isinstance(each, ToolCall):
                self.calls.append(each)
            else:
                self.errors.append((each, start, end))

    def parsed(self) -> ParsedText:
        reasoning = "\n".join(filter(None, self.reasoning))
        if not self.content and self.unread < 0:
            return ParsedText(self.text, reasoning=reasoning)
        self.content.append(self.text[self.start :])
        content = "\n".join(piece for piece in map(str.strip, self.content) if piece)
        errors = [(f"invalid tool call: {message}", start, end) for message, start, end in self.errors[:MOST_ERRORS]]
        if more := self.errors[MOST_ERRORS:]:
            errors.append((f"{len(more)} more invalid tool calls", more[0][1], more[-1][2]))
        if self.unread >= 0:
            message = f"after {MOST_ERRORS} invalid tool calls the rest of the turn was not read"
            errors.append((message, self.unread, len(self.text)))
        spans = [(start, end) for _, start, end in errors]
        return ParsedText(content, self.calls, [f"Error: {message}" for message, _, _ in errors], reasoning, spans)


def reason(error: Exception, start: int) -> str:
    """What is wrong, for the model to read; places count from ``start``."""
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg} at character {error.pos - start}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _parameters(tools: Sequence[dict[str, Any]]) -> Tools:
    functions = [tool.get("function", tool) for tool in tools]
    return {function["name"]: function.get("parameters") or {} for function in functions if "name" in function}


def calls_in_json(
    *,
    arguments: Sequence[str] = ("arguments",),
    more: Sequence[str] = (),
    lists: bool = False,
    marked_only: bool = True,
) -> Read:
    """Reads an object with the name and the arguments of a call; where the header has the name, only the arguments.

    Args:
        arguments: keys under which the arguments may stand.
        more: keys that may stand beside name and arguments.
        lists: a list of such objects is several calls.
        marked_only: False: an object, or a list of objects, without arguments behind no mark is content.
    """
    allowed = {"name", *arguments, *more}

    def read(body: Body) -> tuple[Found, int]:
        value, end = read_json(body.text, body.start)
        if body.name:
            return [ToolCall(body.name, _arguments(value))], end
        objects = value if lists and isinstance(value, list) else [value]
        is_call = any(isinstance(each, dict) and each.keys() & set(arguments) for each in objects)
        if not marked_only and not body.marked and not is_call:
            raise NotACallError(end)
        if not lists or not isinstance(value, list):
            return [call(value)], end
        if not value:
            raise ValueError("the list of calls is empty")
        return [_or_message(call, each) for each in value], end

    def call(value: Any) -> ToolCall:
        if not isinstance(value, dict):
            raise ValueError(f"expected a JSON object, not {_json_type(value)}")
        name = value.get("name")
        if not isinstance(name, str) or not name:
            raise ValueError('"name" is missing' if "name" not in value else '"name" must be the name of a tool')
        if not value.keys() <= allowed:
            unknown = next(key for key in value if key not in allowed)
            names = " and ".join(f'"{key}"' for key in ("name", *arguments))
            raise ValueError(f"unknown key {unknown[:40]!r}; allowed are {names}")
        return ToolCall(name, _arguments(next((value[key] for key in arguments if key in value), {})))

    return read


def _or_message(call: Callable[[Any], ToolCall], value: Any) -> ToolCall | str:
    try:
        return call(value)
    except ValueError as error:
        return str(error)


def _arguments(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value, end = read_json(text := value, skip_space(value, 0))
        except (ValueError, RecursionError) as error:
            raise ValueError('"arguments" is a string that holds no JSON object') from error
        if text[end:].strip():
            raise ValueError('"arguments" is a string with text after its JSON object')
    if not isinstance(value, dict):
        raise ValueError(f'"arguments" must be a JSON object, not {_json_type(value)}')
    return value


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    return {list: "an array", dict: "an object", str: "a string", bool: "a boolean"}.get(type(value), "a number")


def arguments_in_tags(opening: str, closing: str, *, own_lines: bool = False) -> Read:
    """Reads arguments that are texts between tags, and gives them the types that the tool's schema says.

    There is no escape: an argument ends at the first ``closing``, and cannot hold the mark of a call.

    Args:
        opening: regex with the group ``key``; a group ``is_text`` says what the schema would.
        closing: ends an argument.
        own_lines: one line break at either end of a text belongs to the tags.
    """
    tag = re.compile(rf"\s*{opening}")

    def read(body: Body) -> tuple[Found, int]:
        schema = body.tools.get(body.name, {})
        properties, definitions = schema.get("properties", {}), schema.get("$defs", {})
        arguments: dict[str, Any] = {}
        position = body.start
        while opens := tag.match(body.text, position, body.limit):
            key = opens["key"]
            end = body.text.find(closing, opens.end(), body.limit)
            if end < 0:
                raise ValueError(f"no {closing} after the argument {key[:40]!r}")
            if key in arguments:
                raise ValueError(f"the argument {key[:40]!r} stands twice")
            text = body.text[opens.end() : end]
            if own_lines:
                text = text.removeprefix("\n").removesuffix("\n")
            is_text = opens.groupdict().get("is_text")
            known = {"type": "string"} if key not in properties else properties[key]
            if is_text is not None:
                known = {"type": "string"} if is_text == "true" else {}
            arguments[key] = typed(text, known, definitions)
            position = end + len(closing)
        return [ToolCall(body.name, arguments)], position

    return read


def read_fields(body: Body) -> tuple[Found, int]:
    """Reads arguments as Gemma writes them: a literal with bare keys."""
    value, end = read_literal(body.text, body.start)
    return [ToolCall(body.name, _arguments(value))], end


_CALL = re.compile(r"\s*([A-Za-z_][\w.\-]*)\s*\(")
_KEYWORD = re.compile(r"\s*([^\W\d]\w*)\s*=(?!=)")
_SEPARATOR = re.compile(r"\s*[,;]?")


def read_python(body: Body) -> tuple[Found, int]:
    """Reads calls in Python's notation with keyword arguments, in a list or one after the other."""
    text = body.text
    position = skip_space(text, body.start)
    bracket = text.startswith("[", position)
    position += bracket
    calls: Found = []
    while opens := _CALL.match(text, position):
        try:
            arguments, position = _keywords(text, opens.end())
        except ValueError:
            if not body.marked and body.tools and opens[1] not in body.tools:
                raise NotACallError from None
            raise
        calls.append(ToolCall(opens[1], arguments))
        separator = _SEPARATOR.match(text, position)
        if bracket and separator and not separator.group().strip():
            break
        position = separator.end() if separator and opens_call(text, separator.end()) else position
    if bracket:
        position = after(text, position, "]", "',' or ']' after a call")
        # White space after it is content's.
        position = text.rindex("]", 0, position) + 1
    if not calls:
        raise ValueError("expected a call such as name(key=value)")
    return calls, position


def opens_call(text: str, position: int) -> bool:
    """Whether a call in Python's notation begins there."""
    return _CALL.match(text, position) is not None


def _keywords(text: str, position: int) -> tuple[dict[str, Any], int]:
    arguments: dict[str, Any] = {}
    while True:
        position = skip_space(text, position)
        if text.startswith(")", position):
            return arguments, position + 1
        if arguments:
            position = after(text, position, ",", "',' or ')'")
            if text.startswith(")", position):
                return arguments, position + 1
        keyword = _KEYWORD.match(text, position)
        if not keyword:
            found = text[position : position + 20]
            raise ValueError(f"expected an argument such as key=value, found {found!r}")
        if keyword[1] in arguments:
            raise ValueError(f"the argument {keyword[1][:40]!r} stands twice")
        arguments[keyword[1]], position = read_literal(text, keyword.end())
