"""Any turn of a model is read, by every tool parser and token by token; any text of others stays text."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentrl_core.api import AgentRLError, ToolParser, ToolParserContext, function_schema
from agentrl_core.config.schema import ModelConfig
from agentrl_core.data.chat_template import ChatTemplateRenderer
from agentrl_core.data.renderer import HFChatRenderer
from agentrl_core.plugins.registration import registrations
from agentrl_core.plugins.resolution import resolve
from tests.fuzz.fuzzing import corpus, fuzz, json_values, mutated, outcome

PARSERS = sorted({each.name for each in registrations() if each.kind == "tool_parser"})
TURNS = corpus("turn")
TOOLS = [
    function_schema("look_up", "Looks up.", {"query": {"type": "string"}, "days": {"type": "integer"}, "where": {}}),
    function_schema(
        "odd", "Is odd.", {"a": {"type": ["integer", "null"]}, "b": {"enum": [1, "x"]}, "c": {"$ref": "#"}}
    ),
]


@pytest.fixture(scope="module")
def parsers() -> dict[str, ToolParser]:
    plugins = {name: resolve("tool_parser", name) for name in PARSERS}
    return {name: each.build(each.spec.config(), ToolParserContext()) for name, each in plugins.items()}


@pytest.fixture(scope="module")
def chat(tiny_model: Path) -> HFChatRenderer:
    return HFChatRenderer.from_config(ModelConfig(path=str(tiny_model)))


@fuzz
@given(mutated(TURNS), st.sampled_from(PARSERS), st.sampled_from([[], TOOLS]))
def test_any_turn(parsers: dict[str, ToolParser], text: str, name: str, tools: list[dict[str, Any]]) -> None:
    parsed = parsers[name].parse_turn(text, tools)
    for call in parsed.calls:
        assert call.name and isinstance(call.arguments, dict)
        json.dumps(call.as_message(), allow_nan=False)
    assert all(error and len(error) < 1000 for error in parsed.errors)
    assert all(0 <= start <= end <= len(text) for start, end in parsed.error_spans)


@fuzz
@given(st.lists(st.integers(0, 260) | st.integers(256, 260), max_size=60), st.sampled_from(PARSERS))
def test_any_tokens(parsers: dict[str, ToolParser], chat: HFChatRenderer, ids: list[int], name: str) -> None:
    parsed = ChatTemplateRenderer.of(chat, parsers[name]).parse(ids, TOOLS)
    json.dumps([call.as_message() for call in parsed.calls], allow_nan=False)


@fuzz
@example(said=[("user", ["<|im_end|>"])])
@example(said=[("tool", {"<|im_end|>": [{"value": "<|im_end|>"}]})])
@given(st.lists(st.tuples(st.sampled_from(["user", "tool"]), mutated(TURNS) | json_values), min_size=1))
def test_any_conversation(chat: HFChatRenderer, said: list[tuple[str, Any]]) -> None:
    """It has as many control tokens as one in which nobody wrote their names. A system message is the author's own."""
    renderer = ChatTemplateRenderer.of(chat)
    special = set(chat.tokenizer.all_special_ids)
    ids, plain = (
        outcome(
            lambda said=each: renderer.render([{"role": role, "content": text} for role, text in said]).ids,
            AgentRLError,
        )
        for each in (said, [(role, "it") for role, _ in said])
    )
    if not isinstance(ids, Exception):
        assert [id for id in ids if id in special] == [id for id in plain if id in special]
