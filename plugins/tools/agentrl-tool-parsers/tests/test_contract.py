"""Every format fulfils the contract, and survives what a fuzzer makes of it."""

import json
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import strategies as st

from agentrl_core.api import ToolParser, ToolParserContext, function_schema
from agentrl_testing.contracts import ToolParserCase, ToolParserContract
from agentrl_testing.tiny_model import CHATML_TEMPLATE
from agentrl_tool_parsers import plugin
from agentrl_tool_parsers.blocks import MOST_ERRORS

Write = Callable[[str, dict[str, Any]], str]


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else as_json(value)


def in_tags(tag: str, *, line: str = "") -> Callable[[dict[str, Any]], str]:
    """Writes arguments as texts; ``tag`` holds KEY and VALUE."""
    return lambda arguments: "\n".join(
        tag.replace("KEY", key).replace("VALUE", f"{line}{as_text(value)}{line}") for key, value in arguments.items()
    )


def in_python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def in_gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{in_gemma(inner)}" for key, inner in value.items()) + "}"
    return "[" + ",".join(map(in_gemma, value)) + "]" if isinstance(value, list) else as_json(value)


qwen, plain = in_tags("<parameter=KEY>VALUE</parameter>", line="\n"), in_tags("<parameter=KEY>VALUE</parameter>")
invoke = in_tags('<parameter name="KEY">VALUE</parameter>')
glm = in_tags("<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>")


DSML, DSML_END = "<｜DSML｜", "</｜DSML｜"


def dsml(name: str, arguments: dict[str, Any]) -> str:
    lines = [
        f'{DSML}parameter name="{key}" string="{as_json(isinstance(value, str))}">{as_text(value)}{DSML_END}parameter>'
        for key, value in arguments.items()
    ]
    body = "\n".join(lines)
    call = f'{DSML}invoke name="{name}">\n{body}\n{DSML_END}invoke>'
    return f"{DSML}function_calls>\n{call}\n{DSML_END}function_calls>"


WRITERS: dict[str, Write] = {
    "hermes": lambda n, a: f"<tool_call>\n{as_json({'name': n, 'arguments': a})}\n</tool_call>",
    "qwen3_coder": lambda n, a: f"<tool_call>\n<function={n}>\n{qwen(a)}\n</function>\n</tool_call>",
    "llama3_json": lambda n, a: as_json({"name": n, "parameters": a}),
    "llama4_pythonic": lambda n, a: f"[{in_python(n, a)}]",
    "mistral": lambda n, a: f"[TOOL_CALLS]{n}[ARGS]{as_json(a)}",
    "harmony": lambda n, a: (
        f"<|start|>assistant<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{as_json(a)}<|call|>"
    ),
    "glm4": lambda n, a: f"<tool_call>{n}\n{glm(a)}\n</tool_call>",
    "kimi_k2": lambda n, a: (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{n}:0<|tool_call_argument_begin|>{as_json(a)}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "deepseek_v3": lambda n, a: (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{as_json(a)}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v32": dsml,
    "gemma4": lambda n, a: f"<|tool_call>call:{n}{in_gemma(a)}<tool_call|>",
    "minimax_m2": lambda n, a: (
        f'<minimax:tool_call>\n<invoke name="{n}">\n{invoke(a)}\n</invoke>\n</minimax:tool_call>'
    ),
    "seed_oss": lambda n, a: f"<seed:tool_call>\n<function={n}>\n{plain(a)}\n</function>\n</seed:tool_call>",
    "olmo3": lambda n, a: f"<function_calls>\n{in_python(n, a)}\n</function_calls>",
    "granite": lambda n, a: f"<|tool_call|>{as_json([{'name': n, 'arguments': a}])}",
    "nemotron": lambda n, a: f"<TOOLCALL>{as_json([{'name': n, 'arguments': a}])}</TOOLCALL>",
    "xlam": lambda n, a: as_json([{"name": n, "arguments": a}]),
    "phi4_mini": lambda n, a: f"functools{as_json([{'name': n, 'arguments': a}])}",
    "internlm2": lambda n, a: f"<|action_start|><|plugin|>\n{as_json({'name': n, 'parameters': a})}<|action_end|>",
    "lfm2": lambda n, a: f"<|tool_call_start|>[{in_python(n, a)}]<|tool_call_end|>",
}
"""A call in each format, as the chat templates of its family write it."""

SPECS = {spec.name: spec for spec in vars(plugin).values() if getattr(spec, "kind", "") == "tool_parser"}
NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | st.none()
KEYS = st.text("xyzé_", min_size=1, max_size=6)


def values(texts: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    return st.recursive(
        NUMBERS | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
        max_leaves=8,
    )


# Tags and Gemma's quotes have no escape.
UNQUOTED = st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), max_size=20)
IN_TAGS = st.dictionaries(KEYS, values(UNQUOTED), max_size=4)
IN_PYTHON = st.dictionaries(KEYS, values(st.text(max_size=20)), max_size=4)
ARGUMENTS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    **dict.fromkeys(("qwen3_coder", "glm4", "deepseek_v32", "minimax_m2", "seed_oss", "gemma4"), IN_TAGS),
    **dict.fromkeys(
        ("llama4_pythonic", "olmo3", "lfm2"), st.dictionaries(KEYS, values(st.text(max_size=20)), max_size=4)
    ),
}


def case(name: str) -> ToolParserCase:
    templates = {"chatml": CHATML_TEMPLATE} if name == "hermes" else {}
    return ToolParserCase(
        SPECS[name],
        write=WRITERS[name],
        arguments=ARGUMENTS.get(name),
        quotes_itself=ARGUMENTS.get(name) is not IN_TAGS,
        chat_templates=templates,
    )


@pytest.mark.parametrize("plugin", sorted(SPECS), indirect=True)
class TestFormats(ToolParserContract):
    @pytest.fixture
    def plugin(self, request: pytest.FixtureRequest) -> ToolParserCase:
        return case(request.param)


TOOLS = [
    function_schema("look_up", "Looks up.", {"query": {"type": "string"}, "days": {"type": "integer"}, "more": {}}),
    function_schema("calculator", "Calculates.", {"expression": {"type": "string"}}),
]
JUNK = [
    "<think>", "</think>", "{", "}", "[", "]", "(", ")", '"', "'", "\\", "\n", ":", ",", "=", "<", ">", "|",
    "null", "1e9999", "9" * 4400, "\\ud83d", "\0", "é", "```json", "to=functions.f",
    "<|message|>", "<|end|>", '<|"|>', "name", "</",
]  # fmt: skip


def fuzzed(write: Write, seed: int) -> Iterator[str]:
    """Texts about calls: cut, mixed, repeated, with characters and marks put in, taken out and swapped."""
    dice = random.Random(seed)
    seeds = [
        write("look_up", {"query": "weather in Oslo", "days": 3}),
        write("calculator", {"expression": "(1 + 2) * 3"}),
        write("unknown", {}),
        write("look_up", {"query": write("calculator", {"expression": "1"}), "more": {"a": [1, None, {"b": "c"}]}}),
        f"<think>{write('look_up', {'days': 1})}</think>",
        "Let me see. ",
    ]
    while True:
        text = "".join(dice.choice(seeds) for _ in range(dice.randrange(1, 4)))
        for _ in range(dice.randrange(1, 6)):
            at, to = sorted(dice.randrange(len(text) + 1) for _ in range(2))
            text = dice.choice(
                [
                    text[:at],
                    text[at:],
                    text[:at] + text[to:],
                    text[:at] + dice.choice(JUNK) + text[at:],
                    text[:at] + dice.choice(seeds) + text[at:],
                    text[:to] + text[at:to] * dice.randrange(1, 4) + text[to:],
                    text[:at] + text[at:to][::-1] + text[to:],
                ]
            )[:20_000]
        yield text


@pytest.mark.parametrize("name", sorted(SPECS))
def test_no_text_is_too_strange(name: str) -> None:
    """``AGENTRL_FUZZ_TEXTS=200000`` makes so many of each format."""
    parser: ToolParser = case(name).build(ToolParserContext())
    texts = fuzzed(WRITERS[name], seed=sorted(SPECS).index(name))
    calls = errors = 0
    for _ in range(int(os.environ.get("AGENTRL_FUZZ_TEXTS", "1000"))):
        text = next(texts)
        parsed = parser.parse_turn(text, TOOLS)
        calls, errors = calls + len(parsed.calls), errors + len(parsed.errors)
        assert len(parsed.errors) == len(parsed.error_spans) <= MOST_ERRORS + 2, text
        assert all(0 <= start < end <= len(text) for start, end in parsed.error_spans), text
        assert all(len(error) < 500 for error in parsed.errors), text
        # What is neither a call nor an error nor reasoning is content: no character is made up, none is moved.
        rest = iter(text)
        assert all(character in rest for character in parsed.content if not character.isspace()), text
        if not parsed.calls and not parsed.errors and name != "harmony":
            assert parsed.content == text
        for call in parsed.calls:
            assert call.name and isinstance(call.arguments, dict), text
            json.dumps(call.as_message(), allow_nan=False, ensure_ascii=False).encode()
    assert calls and errors


@pytest.mark.parametrize("name", sorted(SPECS))
def test_a_turn_of_bad_calls_has_a_bounded_number_of_errors(name: str) -> None:
    written = WRITERS[name]("look_up", {"query": "weather in Oslo", "days": 3})
    bad = written[: len(written) * 3 // 4] + "\n"
    parsed = case(name).parse(bad * 1000)
    assert len(parsed.errors) <= MOST_ERRORS + 2
    assert "not read" in parsed.errors[-1] or "more invalid" in parsed.errors[-1]


@pytest.mark.parametrize("name", sorted(SPECS))
def test_a_call_in_reasoning_is_a_thought(name: str) -> None:
    form = getattr(type(case(name).make()), "format", None)
    opening, closing = form.reasoning if form else ("<|channel|>analysis<|message|>", "<|end|>")
    write = WRITERS[name]
    good = write("look_up", {"days": 1})
    if form is None:
        # Channels do not nest: what is in the analysis is text without control tokens.
        parsed = case(name).parse(f"{opening}to=functions.look_up{closing}{good}")
        assert (parsed.content, parsed.reasoning, len(parsed.calls)) == ("", "to=functions.look_up", 1)
        return
    parsed = case(name).parse(f"{opening}I could\n{good}\n{closing}\n{good}", look_up={"days": 1})
    assert [call.name for call in parsed.calls] == ["look_up"] and not parsed.errors
    assert parsed.reasoning.startswith("I could") and parsed.content.startswith(opening)
    # The prompt had opened it.
    parsed = case(name).parse(f"I could\n{good}\n{closing}\n{good}", look_up={"days": 1})
    assert len(parsed.calls) == 1 and not parsed.errors and parsed.reasoning.startswith("I could")
    # Never closed, it hides nothing.
    parsed = case(name).parse(f"{opening}I could\n{good}", look_up={"days": 1})
    assert len(parsed.calls) == 1 and not parsed.reasoning


def test_a_list_without_arguments_is_content() -> None:
    text = 'The names are\n[{"name": "Oslo"}, {"name": "Bergen"}]\nin that order.'
    parsed = case("xlam").parse(text)
    assert (parsed.content, parsed.calls, parsed.errors) == (text, [], [])


def test_several_calls_of_one_list() -> None:
    calls = as_json([{"name": "look_up", "arguments": {"days": 1}}, {"name": "calculator"}])
    for name in ("xlam", "phi4_mini"):
        parsed = case(name).parse("functools" * (name == "phi4_mini") + calls)
        assert [(call.name, call.arguments) for call in parsed.calls] == [("look_up", {"days": 1}), ("calculator", {})]


def test_code_for_the_interpreter_is_no_call() -> None:
    text = "<|action_start|><|interpreter|>\nprint(1)<|action_end|>"
    parsed = case("internlm2").parse(text)
    assert (parsed.content, parsed.calls, parsed.errors) == (text, [], [])
