"""What is recognised in the calls that a template writes."""

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest

from agentrl_core.api import ParsedText, ToolCall, ToolParser, ToolParserContext
from agentrl_core.data.call_format import CallFormat, call_format, installed_parsers
from agentrl_core.data.renderer import HFChatRenderer
from agentrl_testing.plugins import IsolatedPlugins
from agentrl_testing.tiny_model import CHATML_TEMPLATE, tiny_tokenizer

CALL = "~ ({'name': call.function.name, 'arguments': call.function.arguments} | tojson)"


class Tags(ToolParser):
    """Reads ``<tool_call>JSON</tool_call>``; ``most`` calls at most."""

    most = 9

    def parse(self, text: str) -> ParsedText:
        found = [json.loads(body) for body in re.findall(r"<tool_call>\n(.*)\n</tool_call>", text)]
        return ParsedText(text, [ToolCall(each["name"], each["arguments"]) for each in found[: self.most]])


class OnlyOne(Tags):
    most = 1


class Texts(Tags):
    def parse_turn(self, text: str, tools: Sequence[dict[str, Any]]) -> ParsedText:
        calls = [ToolCall(c.name, {k: str(v) for k, v in c.arguments.items()}) for c in self.parse(text).calls]
        return ParsedText("", calls)


class Complains(Tags):
    def parse(self, text: str) -> ParsedText:
        return ParsedText("", super().parse(text).calls, ["Error: something"])


def written_by(template: str) -> CallFormat:
    return call_format(HFChatRenderer(tiny_tokenizer(template)), ["<|im_end|>"])


def read_by(found: CallFormat, cls: type[ToolParser]) -> bool:
    return found.is_read_by(cls(None, ToolParserContext()))


def test_only_an_exact_reader_reads_a_format() -> None:
    found = written_by(CHATML_TEMPLATE)
    assert found.one.startswith('<tool_call>\n{"name": "probe_tool"') and found.one.endswith("</tool_call>")
    assert found.two.count("<tool_call>") == 2
    assert [read_by(found, cls) for cls in (Tags, OnlyOne, Texts, Complains)] == [True, False, False, False]
    assert found.readers({"texts": Texts(None, ToolParserContext()), "tags": Tags(None, ToolParserContext())}) == [
        "tags"
    ]


def test_a_template_that_refuses_a_second_call() -> None:
    one = CHATML_TEMPLATE.replace("{%- for call", "{%- if message.tool_calls and message.tool_calls | length > 1 -%}"
                                  "{{ raise_exception('one at most') }}{%- endif -%}{%- for call", 1)  # fmt: skip
    found = written_by(one)
    assert found.one and not found.two and read_by(found, OnlyOne)


def test_a_template_without_calls_in_the_history_has_no_format() -> None:
    found = written_by(CHATML_TEMPLATE.replace(CALL, "~ ''"))
    assert (found.one, found.two, found.reason, found.readers({})) == ("", "", "", [])


def test_a_template_that_refuses_calls_says_why() -> None:
    found = written_by(CHATML_TEMPLATE.replace(CALL, "~ raise_exception('no calls')"))
    assert not found.one and "no calls" in found.reason


def test_a_turn_that_the_history_opens_otherwise_is_found() -> None:
    """The generation prompt opens reasoning; the history has the call at once."""
    thinks = CHATML_TEMPLATE.replace("'<|im_start|>assistant\\n' if", "'<|im_start|>assistant\\n<think>\\n' if")
    assert thinks != CHATML_TEMPLATE
    found = written_by(thinks)
    assert found.one.endswith("</tool_call>") and "<tool_call>\n" in found.one and read_by(found, Tags)


NEEDS_AN_OPTION = """
from dataclasses import dataclass
from agentrl_core.api import ParsedText, PluginSpec, ToolParser, option

@dataclass
class Options:
    tag: str = option(help="of a call")

class Parser(ToolParser):
    def parse(self, text):
        return ParsedText(text, [])

PLUGIN = PluginSpec("tool_parser", "{name}", 1, "reads calls", "{module}:Parser"{config})
"""


def test_an_installed_parser_that_requires_an_option_is_left_out(isolated_plugins: IsolatedPlugins) -> None:
    for name, config in (("needs", ", config=Options"), ("plain", "")):
        source = NEEDS_AN_OPTION.replace("{name}", name).replace("{module}", f"acme_{name}").replace("{config}", config)
        isolated_plugins.add(
            f"acme-{name}",
            {"agentrl.tool_parsers": {name: f"acme_{name}:PLUGIN"}},
            modules={f"acme_{name}.py": source},
        )
    assert list(installed_parsers()) == ["plain"]


BARE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' + (message.content or '') -}}
{%- if message.tool_calls -%}CALLS{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
LISTED = """{{- PREFIX '[' -}}{%- for call in message.tool_calls -%}{{- ({'name': call.function.name, 'arguments':
call.function.arguments} | tojson) + ('' if loop.last else ', ') -}}{%- endfor -%}{{- ']' -}}"""
ACTION = """{%- for call in message.tool_calls -%}{{- '<|action_start|><|plugin|>\n' + ({'name': call.function.name,
'parameters': call.function.arguments} | tojson) + '<|action_end|>' -}}{%- endfor -%}"""


@pytest.mark.parametrize(("calls", "parser"), [
    (LISTED.replace("PREFIX", ""), "xlam"),
    (LISTED.replace("PREFIX", "'functools' +"), "phi4_mini"),
    (ACTION, "internlm2"),
])  # fmt: skip
def test_the_parser_of_a_family_is_found_by_its_template(calls: str, parser: str) -> None:
    assert written_by(BARE.replace("CALLS", calls)).readers(installed_parsers())[0] == parser
