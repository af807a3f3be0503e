import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentrl_core.api import ParsedText, ToolCall, ToolParserContext
from agentrl_tool_parsers.formats import HermesParser

PARSER = HermesParser(None, ToolParserContext())
GOOD = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "37 * 45"}}\n</tool_call>'
CALL = ToolCall("calculator", {"expression": "37 * 45"})


def parse(text: str) -> ParsedText:
    return PARSER.parse(text)


def only_error(text: str) -> str:
    parsed = parse(text)
    assert (parsed.calls, len(parsed.errors)) == ([], 1)
    return parsed.errors[0]


def test_one_call() -> None:
    assert parse(GOOD) == ParsedText("", [CALL], [])


def test_several_calls_and_the_text_around_them() -> None:
    assert parse(f"First. {GOOD}\nThen\n{GOOD} Done.\n") == ParsedText("First.\nThen\nDone.", [CALL, CALL], [])


def test_text_without_a_call_is_unchanged() -> None:
    assert parse(" #### 1665 \n") == ParsedText(" #### 1665 \n")


def test_closing_tag_inside_a_json_string() -> None:
    arguments = {"code": "print('</tool_call>')  # <tool_call>{}"}
    text = f"<tool_call>{json.dumps({'name': 'run', 'arguments': arguments})}</tool_call>"
    assert parse(text) == ParsedText("", [ToolCall("run", arguments)], [])


@pytest.mark.parametrize("length", range(len("<tool_call>"), len(GOOD)))
def test_cut_off_call_is_never_silent(length: int) -> None:
    assert only_error(GOOD[:length]).startswith("Error: invalid tool call: no </tool_call>")


def test_missing_brace() -> None:
    text = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1"}\n</tool_call>'
    assert only_error(text) == "Error: invalid tool call: not valid JSON: Expecting ',' delimiter at character 56"


def test_bad_call_does_not_hide_its_neighbours() -> None:
    parsed = parse(f"a{GOOD}b<tool_call>oops</tool_call>c<tool_call>{{{GOOD}d")
    assert (parsed.content, parsed.calls, len(parsed.errors)) == ("a\nb\nc\nd", [CALL, CALL], 2)


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        ("", "not valid JSON"),
        ("[1]", "expected a JSON object, not an array"),
        ('"f"', "expected a JSON object, not a string"),
        ('{"arguments": {}}', '"name" is missing'),
        ('{"name": 3, "arguments": {}}', '"name" must be the name of a tool'),
        ('{"name": "", "arguments": {}}', '"name" must be the name of a tool'),
        ('{"name": "f", "arguments": [1]}', '"arguments" must be a JSON object, not an array'),
        ('{"name": "f", "arguments": null}', '"arguments" must be a JSON object, not null'),
        ('{"name": "f", "arguments": "x = 1"}', '"arguments" is a string that holds no JSON object'),
        ('{"name": "f", "arguments": "{} {}"}', '"arguments" is a string with text after its JSON object'),
        ('{"name": "f", "arguments": "[]"}', '"arguments" must be a JSON object, not an array'),
        ('{"name": "f", "parameters": {"x": 1}}', "unknown key 'parameters'"),
        ('{"name": "f", "arguments": {}} }', "text between the call and its end"),
        ('{"name": "f", "arguments": {"x": NaN}}', "NaN is not JSON"),
        ('{"name": "f", "arguments": {"x": "\\ud83d"}}', "half a surrogate pair"),
        ('{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}", "Exceeds the limit"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_malformed_call_is_one_error(inner: str, message: str) -> None:
    assert message in only_error(f"<tool_call>{inner}</tool_call>")


@pytest.mark.parametrize(
    ("inner", "arguments"),
    [
        ('{"name": "f", "arguments": "{\\"x\\": 1}"}', {"x": 1}),
        ('{"name": "f"}', {}),
        ('{"name": "f", "arguments": {"code": "a\nb"}}', {"code": "a\nb"}),
        ('{"arguments": {"x": "\\ud83d\\ude00"}, "name": "f"}', {"x": "😀"}),
    ],
    ids=["arguments as a string", "no arguments", "literal line break", "surrogate pair"],
)
def test_accepted_variants(inner: str, arguments: dict[str, Any]) -> None:
    assert parse(f"<tool_call>{inner}</tool_call>") == ParsedText("", [ToolCall("f", arguments)], [])


def test_call_in_reasoning_is_a_thought() -> None:
    thought = f"<think>I could write {GOOD}.</think>"
    reasoning = f"I could write {GOOD}."
    assert parse(thought) == ParsedText(thought, reasoning=reasoning)
    assert parse(f"{thought}\n{GOOD}") == ParsedText(thought, [CALL], reasoning=reasoning)


def test_a_turn_may_think_twice() -> None:
    text = f"<think>first {GOOD}</think>\n{GOOD}<think>then {GOOD}</think>done"
    parsed = parse(text)
    assert parsed.calls == [CALL] and parsed.reasoning == f"first {GOOD}\nthen {GOOD}"


def test_unclosed_reasoning_hides_no_call() -> None:
    assert parse(f"<think>hm {GOOD}") == ParsedText("<think>hm", [CALL], [])


def test_think_tags_inside_arguments_are_text() -> None:
    arguments = {"a": "<think>", "b": "</think>"}
    text = f"<tool_call>{json.dumps({'name': 'f', 'arguments': arguments})}</tool_call>"
    assert parse(text).calls == [ToolCall("f", arguments)]


def test_turn_that_begins_inside_the_reasoning() -> None:
    thought = f"maybe {GOOD}"
    assert parse(f"{thought}</think>{GOOD}") == ParsedText(f"{thought}</think>", [CALL], reasoning=thought)
    assert parse(thought) == ParsedText("maybe", [CALL])


def test_a_closing_think_tag_inside_an_argument_closes_nothing() -> None:
    text = f"{GOOD}<tool_call>{json.dumps({'name': 'f', 'arguments': {'b': '</think>'}})}</tool_call>"
    assert parse(text) == ParsedText("", [CALL, ToolCall("f", {"b": "</think>"})])


def test_errors_say_where() -> None:
    bad = "<tool_call>oops</tool_call>"
    text = f"a{GOOD}b{bad}c<tool_call>{{"
    parsed = parse(text)
    assert [text[start:end] for start, end in parsed.error_spans] == [bad, "<tool_call>{"]


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        '{"name": "f", ',
        '"arguments": {',
        "}",
        '"',
        "\\",
        "\n",
        " x",
    ]
)


@settings(deadline=None)
@given(st.lists(FRAGMENTS | st.text(max_size=5), max_size=30).map("".join))
@example("<tool_call>")
def test_any_text_is_parsed_and_no_tag_outside_reasoning_is_lost(text: str) -> None:
    parsed = parse(text)
    if "<tool_call>" not in text or (not parsed.calls and not parsed.errors):
        assert parsed.content == text
    if "<tool_call>" in text and "</think>" not in text:
        assert parsed.calls or parsed.errors
    assert len(parsed.calls) + len(parsed.errors) <= text.count("<tool_call>")
    remaining = iter(text)
    assert all(character in remaining for character in parsed.content if not character.isspace())


PLAIN = st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), min_size=1).filter(str.strip)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.builds(
    ToolCall,
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), VALUES, max_size=3),
)
BROKEN = st.sampled_from(
    ["<tool_call></tool_call>", "<tool_call>{]</tool_call>", '<tool_call>{"name": "f"}}</tool_call>']
)


@settings(deadline=None)
@given(st.lists(PLAIN | CALLS | BROKEN.map(lambda text: (text,)), max_size=6))
def test_content_calls_and_errors_account_for_everything(parts: list[Any]) -> None:
    text, content, calls, errors = "", [], [], 0
    for part in parts:
        if isinstance(part, ToolCall):
            text += f"<tool_call>\n{json.dumps({'name': part.name, 'arguments': part.arguments})}\n</tool_call>"
            calls.append(part)
        elif isinstance(part, tuple):
            text += part[0]
            errors += 1
        else:
            text += part
            content.append(part)
    parsed = parse(text)
    assert "".join(parsed.content.split()) == "".join("".join(content).split())
    assert (parsed.calls, len(parsed.errors)) == (calls, errors)


def test_a_call_longer_than_a_window_is_found_wherever_the_window_ends() -> None:
    for length in [*range(970, 1040), 8192, 70_000]:
        text = (
            '<tool_call>{"name": "f", "arguments": {"n": [1234567, true], "code": "'
            + "\\n" * length
            + '"}}</tool_call>'
        )
        assert [len(call.arguments["code"]) for call in PARSER.parse(text).calls] == [length], length
        literals = (
            '<tool_call>{"name": "f", "arguments": {"n": [' + " " * length + "1234567, false, null]}}</tool_call>"
        )
        assert [call.arguments["n"] for call in PARSER.parse(literals).calls] == [[1234567, False, None]], length
