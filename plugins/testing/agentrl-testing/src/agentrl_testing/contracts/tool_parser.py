"""The contract of tool parsers."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl_core.api import ParsedText, ToolCall, ToolParser, ToolParserContext, function_schema
from agentrl_testing.contracts.case import PluginCase, PluginContract

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
ARGUMENTS = st.dictionaries(st.text(min_size=1, max_size=8), JSON, max_size=4)

_settings = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)
PLAIN = "The answer is 4.\n\nNo tool was needed: 1 < 2 && 3 > 2."


@dataclass(kw_only=True)
class ToolParserCase(PluginCase):
    """A tool parser under test.

    Args:
        write: the text of one call, ``(name, arguments) -> text``, as a model would write it.
        arguments: what the format can carry; None: every JSON object.
        quotes_itself: whether a text argument can hold the format's own markers. Formats without an escape cannot.
        chat_templates: Jinja by name; what such a template writes for an assistant's ``tool_calls`` must come back.
    """

    write: Callable[[str, dict[str, Any]], str]
    arguments: st.SearchStrategy[dict[str, Any]] | None = None
    quotes_itself: bool = True
    chat_templates: Mapping[str, str] = field(default_factory=dict)

    def make(self) -> ToolParser:
        """A parser as a worker builds it."""
        parser: ToolParser = self.build(ToolParserContext())
        return parser

    def parse(self, text: str, **tools: dict[str, Any]) -> ParsedText:
        """Parse as the rollout does, and check the types of the result.

        ``tools`` maps the names of the tools to arguments, whose types their schemas have.
        """
        parsed = self.make().parse_turn(text, [_schema_of(name, arguments) for name, arguments in tools.items()])
        assert isinstance(parsed, ParsedText), f"parse returned a {type(parsed).__name__}, not a ParsedText"
        assert isinstance(parsed.content, str), "content is not a text"
        for call in parsed.calls:
            assert isinstance(call, ToolCall) and isinstance(call.name, str), f"{call!r} is not a ToolCall with a name"
            assert isinstance(call.arguments, dict), f"the arguments of {call.name!r} are not a dict"
        assert all(isinstance(error, str) and error for error in parsed.errors), "an error is not a text"
        spans = parsed.error_spans
        assert not spans or len(spans) == len(parsed.errors), "not every error has a place"
        assert all(0 <= start < end <= len(text) for start, end in spans), f"places outside of the text: {spans}"
        assert isinstance(parsed.reasoning, str), "reasoning is not a text"
        return parsed


def _schema_of(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool that takes these arguments."""
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    properties = {key: {"type": kinds.get(type(value), "null")} for key, value in arguments.items()}
    return function_schema(name, "A tool.", properties)


def pairs(parsed: ParsedText) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments of the calls."""
    return [(call.name, call.arguments) for call in parsed.calls]


class ToolParserContract(PluginContract):
    """What every tool parser must do: nothing that a model wrote is dropped in silence."""

    kind = "tool_parser"

    def test_text_without_calls_is_content(self, plugin: ToolParserCase) -> None:
        """It comes back whole."""
        parsed = plugin.parse(PLAIN)
        assert parsed == ParsedText(PLAIN), f"text without calls became {parsed}"
        assert plugin.parse("") == ParsedText(""), "the empty text is not empty content"

    @_settings
    @given(data=st.data())
    def test_arguments_come_back_as_written(self, plugin: ToolParserCase, data: st.DataObject) -> None:
        """Nested, empty, with quotes, newlines and other scripts, as far as the format can carry them."""
        arguments = data.draw(ARGUMENTS if plugin.arguments is None else plugin.arguments)
        parsed = plugin.parse(plugin.write("look_up", arguments), look_up=arguments)
        assert pairs(parsed) == [("look_up", arguments)], f"{arguments} came back as {parsed}"
        assert not parsed.errors, f"a well-formed call has the errors {parsed.errors}"

    def test_markers_inside_a_string_do_not_end_a_call(self, plugin: ToolParserCase) -> None:
        """A call may quote its own syntax."""
        written = plugin.write("look_up", {"x": 1})
        arguments = {"text": written, "tail": "</tool_call> ``` } ] \" ' \\"}
        parsed = plugin.parse(plugin.write("say", arguments), say=arguments, look_up={"x": 1})
        visible = pairs(parsed) == [("say", arguments)] or parsed.errors
        assert visible or not plugin.quotes_itself, f"a call that quotes a call became {parsed} without an error"

    def test_calls_keep_their_order_and_the_text_around_them(self, plugin: ToolParserCase) -> None:
        """Several calls in one turn, with content before them."""
        first, second = plugin.write("first", {"a": 1}), plugin.write("second", {"b": [2]})
        parsed = plugin.parse(f"Let me see.\n{first}\n{second}", first={"a": 1}, second={"b": [2]})
        assert pairs(parsed) == [("first", {"a": 1}), ("second", {"b": [2]})], f"two calls became {parsed}"
        assert "Let me see." in parsed.content, f"the text beside the calls is lost: {parsed.content!r}"
        assert "first" not in parsed.content, "a parsed call is content too"

    def test_a_call_that_is_cut_off_is_never_lost(self, plugin: ToolParserCase) -> None:
        """At every length: the whole call, an error, or text that still shows what was written."""
        arguments = {"query": "weather in Oslo", "days": 3}
        written = plugin.write("look_up", arguments)
        for end in range(1, len(written)):
            parsed = plugin.parse("Wait. " + written[:end], look_up=arguments)
            for call in parsed.calls:
                assert (call.name, call.arguments) == ("look_up", arguments), (
                    f"cut off after {end} characters, the call became {call}: half a call must not run"
                )
            visible = parsed.errors or parsed.calls or written[:end].strip() in parsed.content
            assert visible, f"cut off after {end} characters, the call vanished: {parsed}"

    def test_a_good_call_before_a_bad_one_survives(self, plugin: ToolParserCase) -> None:
        """The second call is cut off; the first one runs."""
        good, bad = plugin.write("first", {"a": 1}), plugin.write("second", {"b": 2})
        parsed = plugin.parse(f"{good}\n{bad[: len(bad) * 2 // 3]}", first={"a": 1}, second={"b": 2})
        assert ("first", {"a": 1}) in pairs(parsed), f"the complete call is lost: {parsed}"
        assert "second" not in {call.name for call in parsed.calls}, "half a call must not run"
        assert parsed.errors or "second" in parsed.content, "the cut-off call vanished"

    @_settings
    @given(text=st.text(max_size=200), cut=st.integers(0, 40))
    def test_no_text_raises(self, plugin: ToolParserCase, text: str, cut: int) -> None:
        """Whatever a model writes, also in the middle of a call."""
        written = plugin.write("look_up", {"x": 1})
        for candidate in (text, written[:cut] + text + written[cut:], text + written[cut:]):
            assert plugin.parse(candidate) == plugin.parse(candidate), "parsing the same text twice differs"

    def test_real_chat_templates_round_trip(self, plugin: ToolParserCase) -> None:
        """What the template writes of a call is what the parser reads."""
        from agentrl_core.data.renderer import HFChatRenderer
        from agentrl_testing.tiny_model import tiny_tokenizer

        for name, template in plugin.chat_templates.items():
            renderer = HFChatRenderer(tiny_tokenizer(template))
            arguments = {"city": "Zürich", "days": 3, "nested": {"list": [1, 2.5, None, True]}}
            call = ToolCall("forecast", arguments, "call00001").as_message()
            question = [{"role": "user", "content": "?"}]
            before = renderer.render(question, generation_prompt=True)
            answer = {"role": "assistant", "content": "", "tool_calls": [call]}
            text = renderer.render([*question, answer]).removeprefix(before)
            for stop in renderer.stop_token_ids:
                text = text.partition(renderer.decode([stop]))[0]
            parsed = plugin.parse(text, forecast=arguments)
            assert pairs(parsed) == [("forecast", arguments)], (
                f"template {name}: {json.dumps(text)} was read as {parsed}"
            )
