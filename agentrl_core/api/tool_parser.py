"""The interface of tool parsers: from the model's text to tool calls.

A parser is pure: no state, no I/O. It never raises on what a model wrote: a call that is cut off or malformed becomes
an entry of ``errors``, which the model reads as an observation. Nothing is dropped in silence. One object serves all
trajectories of an agent-loop worker, on its event loop: ``parse`` is a plain method and must be quick on text of any
length. An exception is a bug of the parser and fails the trajectory.

    class MyParser(ToolParser):
        def parse(self, text):
            return ParsedText(content=text, calls=[], errors=[])

The rollout calls ``parse_turn``. A format without its own types (XML, where every argument is a text) overrides it to
convert the arguments by the tools' schemas.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl_core.api.tree import Node


@dataclass(frozen=True)
class ToolCall:
    """One call.

    Args:
        name: of the function.
        arguments: what the model wrote, decoded.
        id: unique within its branch of the trajectory.
        turn: the turn that wrote it, to which its reward goes. Set by the core; None: the turn that was sampled last.
    """

    name: str
    arguments: dict[str, Any]
    id: str = ""
    turn: Node | None = field(default=None, compare=False, repr=False)

    def as_message(self) -> dict[str, Any]:
        """The entry of an assistant message's ``tool_calls``; arguments stay an object, as chat templates expect."""
        call: dict[str, Any] = {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        if self.id:
            call["id"] = self.id
        return call


@dataclass(frozen=True)
class ParsedText:
    """What a text holds.

    Args:
        content: the text outside calls. Reasoning stays in it as written where the family's chat templates read it out
            of the content; elsewhere the content is without it.
        calls: in order.
        errors: one message per bad call, for the model to read; bounded, the last one says what was left out.
        reasoning: the text of all reasoning, without its tags.
        error_spans: the place of each error: its first character and the one behind its last. Empty where a parser
            does not say.
    """

    content: str
    calls: list[ToolCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    reasoning: str = ""
    error_spans: list[tuple[int, int]] = field(default_factory=list)


class ToolParser(ABC):
    """Finds tool calls in text. Built ``factory(config, context)`` with :class:`ToolParserContext`."""

    def __init__(self, config: Any, context: "ToolParserContext") -> None:
        self.config = config
        self.context = context

    @abstractmethod
    def parse(self, text: str) -> ParsedText:
        """Parse one assistant turn, decoded without its stop token."""

    def parse_turn(self, text: str, tools: Sequence[dict[str, Any]]) -> ParsedText:
        """Parse one assistant turn of a trajectory that shows the model ``tools``: function schemas, as chat templates
        take them. The default ignores them and calls :meth:`parse`.
        """
        return self.parse(text)


@dataclass(frozen=True)
class ToolParserContext:
    """Nothing yet: the field a parser would need most, the tokenizer, is deliberately absent."""
