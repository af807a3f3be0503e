import json
import re

import pytest
from hypothesis import strategies as st

from agentrl_core.api import ParsedText, ToolCall, ToolParser
from agentrl_testing.contracts import ToolParserCase, ToolParserContract
from agentrl_testing.tiny_model import CHATML_TEMPLATE


def write(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Strips(ToolParser):
    def parse(self, text):
        return ParsedText(text.strip() + ".")


class Stringly(ToolParser):
    """Arguments become texts."""

    def parse(self, text):
        calls = [json.loads(body) for body in re.findall(r"<tool_call>\n(.*)\n</tool_call>", text)]
        return ParsedText("", [ToolCall(c["name"], {k: str(v) for k, v in c["arguments"].items()}) for c in calls])


class Silent(ToolParser):
    """Drops what it cannot read, and everything else too."""

    def parse(self, text):
        return ParsedText("")


class Backwards(ToolParser):
    def parse(self, text):
        found = [json.loads(body) for body in re.findall(r"<tool_call>\n(.*)\n</tool_call>", text)]
        return ParsedText(text, [ToolCall(c["name"], c["arguments"]) for c in reversed(found)])


class Eager(ToolParser):
    """Runs half a call."""

    def parse(self, text):
        name = re.search(r'"name": "(\w+)"', text)
        return ParsedText(text, [ToolCall(name[1], {})] if name else [])


class Raises(ToolParser):
    def parse(self, text):
        calls = [json.loads(part.partition("</tool_call>")[0]) for part in text.split("<tool_call>")[1:]]
        return ParsedText(text, [ToolCall(c["name"], c["arguments"]) for c in calls])


class Misplaces(ToolParser):
    """Says that an error is behind the end of the text."""

    def parse(self, text):
        return ParsedText(text, [], ["Error: no calls"], error_spans=[(0, len(text) + 1)])


def write_xml(name, arguments):
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    return f"<call={name}>" + "".join(f"<arg={key}>{text}</arg>" for key, text in texts.items()) + "</call>"


class Xml(ToolParser):
    """Every argument is a text; the schema of its tool says what it stands for."""

    def parse(self, text):
        return self.parse_turn(text, [])

    def parse_turn(self, text, tools):
        schemas = {tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in tools}
        calls = []
        for name, body in re.findall(r"<call=(\w+)>(.*?)</call>", text, re.DOTALL):
            arguments = dict(re.findall(r"<arg=(\w+)>(.*?)</arg>", body, re.DOTALL))
            known = schemas.get(name, {})
            is_text = {key: known.get(key, {}).get("type", "string") == "string" for key in arguments}
            calls.append(ToolCall(name, {k: v if is_text[k] else json.loads(v) for k, v in arguments.items()}))
        rest = re.sub(r"<call=(\w+)>(.*?)</call>", "", text, flags=re.DOTALL)
        return ParsedText(rest.strip() if calls else rest, calls)


class TestXml(ToolParserContract):
    """A format without JSON, types and escapes fulfils the contract."""

    @pytest.fixture
    def plugin(self, spec):
        words = st.text("abc äß\n", max_size=8)
        numbers = st.integers() | st.booleans() | st.lists(st.integers(), max_size=3)
        arguments = st.dictionaries(st.text("xyz", min_size=1), words | numbers, max_size=4)
        return ToolParserCase(
            spec("tool_parser", Xml), write=write_xml, arguments=arguments, quotes_itself=False, chat_templates={}
        )


def test_every_check_catches_a_broken_parser(spec, catches) -> None:
    def case(cls):
        return ToolParserCase(spec("tool_parser", cls), write=write, chat_templates={"chatml": CHATML_TEMPLATE})

    catches(
        ToolParserContract,
        {
            "test_text_without_calls_is_content": [case(Strips), case(Silent)],
            "test_arguments_come_back_as_written": [case(Stringly)],
            "test_markers_inside_a_string_do_not_end_a_call": [case(Silent), case(Eager), case(Raises)],
            "test_calls_keep_their_order_and_the_text_around_them": [case(Backwards), case(Silent)],
            "test_a_call_that_is_cut_off_is_never_lost": [case(Silent), case(Eager), case(Raises)],
            "test_a_good_call_before_a_bad_one_survives": [case(Silent), case(Raises)],
            "test_no_text_raises": [case(Raises), case(Misplaces)],
            "test_real_chat_templates_round_trip": [case(Silent), case(Stringly)],
        },
    )
