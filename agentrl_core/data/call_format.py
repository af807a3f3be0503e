"""Which tool parser reads the calls that a chat template writes? Answered by rendering calls and parsing them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix

from agentrl_core.api import (
    Message,
    TemplateError,
    ToolCall,
    ToolParser,
    ToolParserContext,
    function_schema,
)
from agentrl_core.config.introspect import members
from agentrl_core.data.template_check import Template
from agentrl_core.plugins.discovery import discover
from agentrl_core.plugins.resolution import resolve

_NAME = "probe_tool"
_SCHEMA = function_schema(
    _NAME, "A probe.", {"value": {"type": "string", "description": "any text"}, "count": {"type": "integer"}}
)
_QUESTION: Message = {"role": "user", "content": "first question"}
_CALLS = (
    ToolCall(_NAME, {"value": "12, please", "count": 3}, "call00001"),
    ToolCall(_NAME, {"value": "probe value"}, "call00002"),
)


@dataclass(frozen=True)
class CallFormat:
    """How a chat template writes calls.

    Args:
        one: a turn with one call; empty: the template leaves calls out of the history, or refuses them.
        two: a turn with two calls; empty: it refuses them, or leaves the second one out.
        reason: what the template said where it refused one call.
    """

    one: str
    two: str
    reason: str = ""

    def is_read_by(self, parser: ToolParser) -> bool:
        """Whether the parser reads every call exactly as it was rendered, and nothing else."""
        return all(
            [(call.name, call.arguments) for call in parsed.calls] == [(call.name, call.arguments) for call in calls]
            and not parsed.errors
            for text, calls in ((self.one, _CALLS[:1]), (self.two, _CALLS))
            if text
            for parsed in [parser.parse_turn(text, [_SCHEMA])]
        )

    def readers(self, parsers: Mapping[str, ToolParser]) -> list[str]:
        """The names of the parsers that read the calls, the one that leaves least of their marks as content first."""

        def rest(name: str) -> int:
            return len(parsers[name].parse_turn(self.one, [_SCHEMA]).content)

        return sorted((name for name in parsers if self.one and self.is_read_by(parsers[name])), key=rest)


def call_format(renderer: Template, stops: Sequence[str] = ()) -> CallFormat:
    """Render calls with the template of a renderer.

    Args:
        renderer: of the model.
        stops: texts of the tokens that end a turn; what follows one is no part of it.

    Raises:
        TemplateError: the template cannot even render one user message.
    """
    prompts = [renderer.render([_QUESTION], [_SCHEMA], generation_prompt=prompted) for prompted in (True, False)]

    def turn(calls: Sequence[ToolCall]) -> str:
        message: Message = {"role": "assistant", "content": "", "tool_calls": [call.as_message() for call in calls]}
        rendered = renderer.render([_QUESTION, message], [_SCHEMA])
        # What opens the turn stays in it where the history opens it otherwise than the prompt does.
        prompt = next((prompt for prompt in prompts if rendered.startswith(prompt)), commonprefix([*prompts, rendered]))
        text = rendered[len(prompt) :]
        written = all(str(call.arguments["value"]) in text for call in calls)
        for stop in stops:
            text = text.partition(stop)[0] or text
        return text if written else ""

    try:
        one = turn(_CALLS[:1])
    except TemplateError as error:
        return CallFormat("", "", str(error))
    try:
        return CallFormat(one, turn(_CALLS))
    except TemplateError:
        return CallFormat(one, "")


def installed_parsers(block: Sequence[str] = ()) -> dict[str, ToolParser]:
    """Every installed tool parser with its default options, by name; one that requires an option is left out.

    Args:
        block: names, packages or ``package:name`` to exclude.
    """
    usable = [
        resolve("tool_parser", row.name, block=block) for row in discover(["tool_parser"], block) if row.status == "ok"
    ]
    return {
        each.ref.name: each.build(each.spec.config(), ToolParserContext())
        for each in usable
        if all(member.default is not None for member in members(each.spec.config).values())
    }


def renderer_of(parser: str, block: Sequence[str] = ()) -> str:
    """The installed renderer that reads the format of a tool parser by its control tokens; empty if there is none.

    It has the parser's name.
    """
    rows = discover(["renderer"], block)
    return next((row.name for row in rows if row.status == "ok" and row.name == parser), "")
