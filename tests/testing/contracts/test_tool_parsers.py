import json
import re

from agentrl_core.api import ParsedText, ToolCall, ToolParser
from agentrl_core.testing.contracts import ToolParserCase, ToolParserContract
from agentrl_core.testing.tiny_model import CHATML_TEMPLATE


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
            "test_no_text_raises": [case(Raises)],
            "test_real_chat_templates_round_trip": [case(Silent), case(Stringly)],
        },
    )
