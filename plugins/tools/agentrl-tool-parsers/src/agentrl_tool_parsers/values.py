"""Values as models write them: JSON, Python literals and Gemma's notation, and texts that a schema gives a type.

Nothing here evaluates text. Readers take a text and a position, and return a value and where it ends; they raise
ValueError (or RecursionError) with what is wrong, in time linear in what they read.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

_SPACE = re.compile(r"\s*")
_WINDOW = 1024
_LONGEST_LITERAL = 16

_NUMBER = re.compile(r"[+-]?\d+(?P<fraction>\.\d*)?(?P<exponent>[eE][+-]?\d+)?")
_WORD = re.compile(r"[A-Za-z_][\w.\-]*")
_BARE_KEY = re.compile(r"[^\s:,{}\[\]\"'()]+")
_STRINGS = {quote: re.compile(rf"[^{quote}\\]*(?:\\.[^{quote}\\]*)*", re.DOTALL) for quote in "\"'"}
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.))", re.DOTALL
)  # fmt: skip
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_SELF = set("\\'\"/")
_CONSTANTS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
GEMMA_QUOTE = '<|"|>'


def skip_space(text: str, position: int) -> int:
    """Where the white space from ``position`` on ends."""
    match = _SPACE.match(text, position)
    return match.end() if match else position


def read_json(text: str, begin: int) -> tuple[Any, int]:
    """The JSON value at ``begin``. Line breaks in strings are accepted, because models that write code produce them.

    Decoded in windows that grow until the value, or its error, lies well inside: a decoder's error counts the lines of
    everything before it, which takes quadratic time for a text of many bad calls.
    """
    size = _WINDOW
    while True:
        window = text[begin : begin + size]
        complete = begin + size >= len(text)
        try:
            value, end = DECODER.raw_decode(window)
        except json.JSONDecodeError as error:
            if complete or (error.pos < size - _LONGEST_LITERAL and not error.msg.startswith("Unterminated")):
                error.pos += begin
                raise
        else:
            if complete or end < size:
                if "\\u" in window[:end]:
                    check_unicode(value)
                return value, begin + end
        size *= 8


def check_unicode(value: Any) -> None:
    """Refuse half a surrogate pair (``\\ud83d`` alone): a str that no tokenizer can encode."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("half a surrogate pair in a \\u escape") from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"the number {digits[:40]} is too large")
    return number


DECODER = json.JSONDecoder(strict=False, parse_constant=_no_constant, parse_float=_finite)


def read_literal(text: str, position: int) -> tuple[Any, int]:
    """The literal at ``position``: Python's or JSON's, mixed as models mix them, or Gemma's with its quotes and bare
    keys. Names other than true, false and null in their two spellings, calls and operators are refused.
    """
    position = skip_space(text, position)
    head = text[position : position + 1]
    if head in ("'", '"') and head:
        return _string(text, position)
    if head == "<" and text.startswith(GEMMA_QUOTE, position):
        return _gemma_string(text, position)
    if head == "{":
        return _dict(text, position + 1)
    if head in ("[", "(") and head:
        return _list(text, position + 1, "]" if head == "[" else ")")
    if number := _NUMBER.match(text, position):
        digits = number.group()
        is_float = number["fraction"] is not None or number["exponent"] is not None
        return (_finite(digits) if is_float else int(digits)), number.end()
    if (word := _WORD.match(text, position)) and word.group() in _CONSTANTS:
        return _CONSTANTS[word.group()], word.end()
    found = text[position : position + 20]
    raise ValueError(f"expected a value, found {found!r}" if found else "the text ends where a value should be")


def _string(text: str, position: int) -> tuple[str, int]:
    quote = text[position]
    if text.startswith(quote * 3, position):
        end = text.find(quote * 3, position + 3)
        body, after = text[position + 3 : end], end + 3
    else:
        match = _STRINGS[quote].match(text, position + 1)
        end = match.end() if match else len(text)
        body, after = text[position + 1 : end], end + 1
        end = end if text.startswith(quote, end) else -1
    if end < 0:
        raise ValueError("a string is not closed")
    if "\\" in body:
        body = _ESCAPE.sub(_unescaped, body)
        if any(0xD800 <= ord(character) < 0xE000 for character in body):
            # JSON writes what is outside the first plane as two escapes.
            body = _joined_surrogates(body)
    return body, after


def _joined_surrogates(text: str) -> str:
    try:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError as error:
        raise ValueError("half a surrogate pair in a \\u escape") from error


def _unescaped(match: re.Match[str]) -> str:
    hexadecimal, octal, other = match[1] or match[2] or match[3], match[4], match[5]
    if hexadecimal:
        code = int(hexadecimal, 16)
        if code > 0x10FFFF:
            raise ValueError(f"\\U{hexadecimal} is no character")
        return chr(code)
    if octal:
        return chr(int(octal, 8))
    return _ESCAPES.get(other, other if other in _SELF else f"\\{other}")


def _gemma_string(text: str, position: int) -> tuple[str, int]:
    start = position + len(GEMMA_QUOTE)
    end = text.find(GEMMA_QUOTE, start)
    if end < 0:
        raise ValueError("a string is not closed")
    return text[start:end], end + len(GEMMA_QUOTE)


def _list(text: str, position: int, closing: str) -> tuple[list[Any], int]:
    values: list[Any] = []
    while True:
        position = skip_space(text, position)
        if text.startswith(closing, position):
            return values, position + 1
        if values:
            position = after(text, position, ",", f"',' or {closing!r}")
            if text.startswith(closing, position):
                return values, position + 1
        value, position = read_literal(text, position)
        values.append(value)


def _dict(text: str, position: int) -> tuple[dict[str, Any], int]:
    values: dict[str, Any] = {}
    first = True
    while True:
        position = skip_space(text, position)
        if text.startswith("}", position):
            return values, position + 1
        if not first:
            position = after(text, position, ",", "',' or '}'")
            if text.startswith("}", position):
                return values, position + 1
        key, position = _key(text, position)
        position = after(text, position, ":", "':'")
        values[key], position = read_literal(text, position)
        first = False


def _key(text: str, position: int) -> tuple[str, int]:
    if text.startswith(("'", '"'), position):
        return _string(text, position)
    if text.startswith(GEMMA_QUOTE, position):
        return _gemma_string(text, position)
    bare = _BARE_KEY.match(text, position)
    if not bare:
        raise ValueError(f"expected a key, found {text[position : position + 20]!r}")
    return bare.group(), bare.end()


def after(text: str, position: int, mark: str, what: str) -> int:
    """Where the text goes on after ``mark`` and the white space round it; ValueError naming ``what`` without it."""
    position = skip_space(text, position)
    if not text.startswith(mark, position):
        found = text[position : position + 20]
        raise ValueError(f"expected {what}, found {found!r}" if found else f"expected {what}, but the text ends")
    return skip_space(text, position + len(mark))


def typed(text: str, schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Any:
    """The argument that ``text`` stands for, in a format where all arguments are texts.

    Args:
        text: as it stands in the call.
        schema: the parameter's. Where it takes strings, only a value of another type that it takes too is converted;
            otherwise whatever reads as JSON or as a Python literal is. The text stays where neither can be read: the
            tool refuses it with a better message.
        definitions: the ``$defs`` that schemas refer to.
    """
    types = _types(schema, definitions, 8)
    if types == {"string"}:
        return text
    try:
        value, end = read_json(text, skip_space(text, 0))
        if text[end:].strip():
            raise ValueError
    except (ValueError, RecursionError):
        try:
            value, end = read_literal(text, 0)
        except (ValueError, RecursionError):
            return text
        if text[end:].strip():
            return text
    if "string" not in types:
        return value if types or not isinstance(value, str) else text
    return value if types & _names(value) else text


def _names(value: Any) -> set[str]:
    """The types of JSON Schema, other than string, that a value has."""
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if value is None:
        return {"null"}
    return {name for kind, name in ((float, "number"), (list, "array"), (dict, "object")) if isinstance(value, kind)}


def _types(schema: Any, definitions: Mapping[str, Any], depth: int) -> set[str]:
    """The types that a schema takes; empty: it does not say."""
    if not isinstance(schema, Mapping) or not depth:
        return set()
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set[str]()
    if isinstance(declared, list):
        types |= {each for each in declared if isinstance(each, str)}
    if not types:
        values = (
            schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
        )
        for value in values:
            types |= {"string"} if isinstance(value, str) else _names(value)
    for name in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(name)
        for choice in choices if isinstance(choices, list) else ():
            types |= _types(choice, definitions, depth - 1)
    reference = schema.get("$ref")
    if isinstance(reference, str):
        types |= _types(definitions.get(reference.rpartition("/")[2]), definitions, depth - 1)
    if types and schema.get("nullable") is True:
        types.add("null")
    return types
