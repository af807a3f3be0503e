"""Harmony, the format of gpt-oss: a turn is a series of messages, each with a channel and perhaps a recipient."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from agentrl_core.api import ParsedText, ToolCall, ToolParser
from agentrl_tool_parsers.blocks import MOST_ERRORS, Turn, reason
from agentrl_tool_parsers.values import read_json, skip_space

_TAG = re.compile(r"<\|(start|channel|constrain|message|end|call|return)\|>")
_RECIPIENT = re.compile(r"(?:^|(?<=\s))to=(\S+)")
_HEADER = ("start", "channel", "constrain")


class HarmonyParser(ToolParser):
    """Finds calls such as ``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>``.

    The recipient may also stand before the channel, as the chat template writes it. A message to a recipient is a call
    on every channel. The channel ``analysis`` is reasoning and no part of the content, because the template takes it in
    a field of its own; other messages are content. The last message may lack its end: that token has ended the turn.
    """

    def parse(self, text: str) -> ParsedText:
        return self.parse_turn(text, [])

    def parse_turn(self, text: str, tools: Sequence[dict[str, Any]]) -> ParsedText:
        if not _TAG.search(text):
            return ParsedText(text)
        turn = Turn(text, start=len(text))
        header, channel, recipient, resume = -1, "", "", 0
        for kind, at, begin, end in _pieces(text):
            if at < resume:
                # A tag in a string of a call.
                continue
            if turn.failures >= MOST_ERRORS:
                turn.unread = at
                break
            piece = text[begin:end]
            if kind in _HEADER:
                header = at if header < 0 else header
                recipient = _recipient(piece) or recipient
                channel = piece.split(maxsplit=1)[0] if kind == "channel" and piece.strip() else channel
                continue
            if kind == "message":
                if recipient:
                    found, resume = _call(text, begin, end, recipient)
                    _take(turn, found, header, resume)
                elif channel == "analysis":
                    turn.reasoning.append(piece.strip())
                else:
                    turn.content.append(piece)
                header, channel, recipient = -1, "", ""
                continue
            if header >= 0:
                _take(turn, "no <|message|> after the header", header, at)
            channel, recipient = "", _recipient(piece)
            header = at if recipient else -1
            turn.content.append(_RECIPIENT.sub("", piece) if recipient else piece)
        if turn.unread < 0 and header >= 0:
            _take(turn, "no <|message|> after the header; it is cut off", header, len(text))
        turn.content.append("")
        turn.start = turn.unread if turn.unread >= 0 else len(text)
        return turn.parsed()


def _take(turn: Turn, found: ToolCall | str, start: int, end: int) -> None:
    turn.start = start
    turn.take([found], start, end)


def _pieces(text: str) -> Iterator[tuple[str, int, int, int]]:
    """The text cut at its tags: each tag (none for the first piece), its place, and the text behind it."""
    kind, at, begin = "", 0, 0
    for tag in _TAG.finditer(text):
        yield kind, at, begin, tag.start()
        kind, at, begin = tag[1], tag.start(), tag.end()
    yield kind, at, begin, len(text)


def _recipient(piece: str) -> str:
    found = _RECIPIENT.search(piece)
    return found[1] if found else ""


def _call(text: str, begin: int, end: int, recipient: str) -> tuple[ToolCall | str, int]:
    """The call whose JSON begins at ``begin``, or what is wrong with it, and where the text goes on."""
    name, start = recipient.removeprefix("functions."), skip_space(text, begin)
    if not name:
        return "no name of a tool", end
    try:
        arguments, json_end = read_json(text, start)
    except (ValueError, RecursionError) as error:
        return reason(error, start), end
    if not isinstance(arguments, dict):
        return "the arguments must be a JSON object", end
    tag = _TAG.search(text, json_end)
    end = tag.start() if tag else len(text)
    if text[json_end:end].strip():
        return "text after the JSON object", end
    return ToolCall(name, arguments), end
