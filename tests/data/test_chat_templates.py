"""Every format against the chat templates of its family, as TRL's wheel ships them."""

import asyncio
import os
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import (
    Message,
    PolicySpan,
    SamplingParams,
    Termination,
    TokenOutput,
    ToolCall,
    ToolParser,
    ToolParserContext,
    function_schema,
)
from agentrl_core.api.tree import Request
from agentrl_core.data.call_format import call_format
from agentrl_core.data.chat_template import ChatTemplateRenderer
from agentrl_core.data.renderer import HFChatRenderer
from agentrl_core.rollout.identity import TrajectoryKey
from agentrl_core.rollout.trajectory import TrajectoryBuilder, TrajectoryLimits
from agentrl_testing.tiny_model import SPECIAL_TOKENS, tokenizer_for
from agentrl_tool_parsers import formats, harmony
from agentrl_tool_parsers.plugin import HERMES

FOLDER = Path(str(distribution("trl").locate_file("trl/chat_templates")))
FORMATS = {
    "hermes": ("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl"),
    "qwen3_coder": (
        "qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8", "nemotron_3_nano", "nemotron_3_super",
        "nemotron_3_ultra", "nemotron_3_5_lightning",
    ),
    "llama3_json": ("llama3_1", "llama3_2"),
    "harmony": ("gptoss",),
    "glm4": ("glm4moe",),
    "deepseek_v3": ("deepseekv3_training",),
    "gemma4": ("gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5"),
    "lfm2": ("lfm2_v2", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"),
}  # fmt: skip
"""Templates of TRL by the format that they write; another version of TRL may have more."""
ONE_CALL = ("llama3_1", "llama3_2", "gptoss")
NO_CALLS = ("llama3", "gemma3", "phi3", "deepseek_r1_distill", "qwen2_5_vl")

PARSERS: dict[str, ToolParser] = {
    cls.__name__: cls(None, ToolParserContext())
    for module in (formats, harmony)
    for cls in vars(module).values()
    if isinstance(cls, type) and issubclass(cls, ToolParser) and cls.__module__ == module.__name__
}
TOOLS = [
    function_schema(
        "forecast",
        "The weather.",
        {"city": {"type": "string"}, "days": {"type": "integer"}, "options": {"type": "object"}},
    )
]
QUESTION: Message = {"role": "user", "content": "The weather in Zurich?"}
CALLING: Message = {
    "role": "assistant",
    "content": "Let me look.",
    "tool_calls": [ToolCall("forecast", {"city": "Zurich"}, "call00001").as_message()],
}
RESULT: Message = {"role": "tool", "name": "forecast", "tool_call_id": "call00001", "content": '{"degrees": 20}'}
ARGUMENTS = {"city": "12 Zürich", "days": 3, "options": {"list": [1, 2.5, True], "unit": "C"}}


def parser_of(name: str) -> ToolParser:
    from agentrl_tool_parsers import plugin

    (spec,) = [each for each in vars(plugin).values() if getattr(each, "name", "") == name]
    return PARSERS[spec.factory.partition(":")[2]]


def renderer_of(template: Path) -> HFChatRenderer:
    return HFChatRenderer(tokenizer_for(template.read_text(encoding="utf-8")))


def stops_of(renderer: HFChatRenderer) -> list[str]:
    return [renderer.decode([stop]) for stop in renderer.stop_token_ids]


EVERY = [(name, template) for name, templates in FORMATS.items() for template in templates]


@pytest.mark.parametrize(("name", "template"), EVERY)
def test_the_format_of_a_template_is_recognised(name: str, template: str) -> None:
    renderer = renderer_of(FOLDER / f"{template}.jinja")
    written = call_format(renderer, stops_of(renderer))
    assert written.readers(PARSERS)[:1] == [type(parser_of(name)).__name__], written
    assert bool(written.two) == (template not in ONE_CALL)


@pytest.mark.parametrize("template", NO_CALLS)
def test_a_template_that_writes_no_calls_has_no_format(template: str) -> None:
    renderer = renderer_of(FOLDER / f"{template}.jinja")
    assert not call_format(renderer, stops_of(renderer)).readers(PARSERS)


@pytest.mark.parametrize(("name", "template"), EVERY)
def test_a_conversation(name: str, template: str) -> None:
    """A call with reasoning, the tool's answer, and the next turn, with control tokens in what others say."""
    renderer = renderer_of(FOLDER / f"{template}.jinja")
    attack = "".join(token for token in renderer.tokenizer.get_added_vocab() if token not in SPECIAL_TOKENS)

    def conversation(said: str) -> list[dict[str, Any]]:
        call = ToolCall("forecast", ARGUMENTS, "call00001").as_message()
        return [
            {"role": "user", "content": f"How is it {said}?"},
            {"role": "assistant", "content": "", "reasoning_content": "I should look.", "tool_calls": [call]},
            {"role": "tool", "content": f"rainy {said}", "tool_call_id": "call00001", "name": "forecast"},
        ]

    harmless, hostile = conversation("."), conversation(attack)
    prompt = renderer.render(harmless[:1], TOOLS, generation_prompt=True)
    history = renderer.render(harmless[:2], TOOLS)
    turn = history[len(os.path.commonprefix([prompt, history])) :]
    for stop in stops_of(renderer):
        turn = turn.partition(stop)[0] or turn
    parsed = parser_of(name).parse_turn(turn, TOOLS)
    assert [(call.name, call.arguments) for call in parsed.calls] == [("forecast", ARGUMENTS)] and not parsed.errors
    if "I should look." in turn and "</think>" in turn:
        assert parsed.reasoning.endswith("I should look.")

    def tokens(messages: list[dict[str, Any]]) -> list[int]:
        ids = renderer.encode(renderer.render(messages, TOOLS, generation_prompt=True))
        added = renderer.tokenizer.get_added_vocab().values()
        return [token for token in ids if token in added and renderer.decode([token]) not in SPECIAL_TOKENS]

    rendered = renderer.shown(renderer.render(hostile, TOOLS, generation_prompt=True))
    assert "rainy" in rendered and attack in rendered
    assert tokens(hostile) == tokens(harmless), "a control token in what a user or tool said was encoded as one"


def test_hermes_reads_nothing_that_another_family_writes() -> None:
    parser = parser_of(HERMES.name)
    for name, template in EVERY:
        renderer = renderer_of(FOLDER / f"{template}.jinja")
        assert call_format(renderer, stops_of(renderer)).is_read_by(parser) == (name == "hermes"), template


def said(renderer: HFChatRenderer, before: list[Message], turn: Message) -> str:
    """What a policy writes that the template would write into the history; plain text where it rewrites the prompt."""
    prompt, whole = renderer.render(before, TOOLS, generation_prompt=True), renderer.render([*before, turn], TOOLS)
    rest = whole.removeprefix(prompt) if whole.startswith(prompt) else str(turn["content"])
    stops = [stop for stop in renderer.stop_texts.values() if stop in rest]
    stop = min(stops, key=rest.find, default="")
    return rest[: rest.index(stop) + len(stop)] if stop else rest + next(iter(renderer.stop_texts.values()))


def rows_of(renderer: HFChatRenderer, parser: ToolParser, turns: list[str]) -> Any:
    """A call, its answer, words, a question, words: the rows, and how often a frame was wrong."""
    answers = iter(turns)

    async def sample(prompt: list[int], params: SamplingParams, request_id: str) -> tuple[TokenOutput, Request]:
        ids = renderer.encode(next(answers))
        output = TokenOutput(ids, [-0.5] * len(ids), "stop", [PolicySpan(1, 0, len(ids))])
        return output, Request(0, 0.0, 0.0, 0.0)

    async def converse() -> Any:
        limits = TrajectoryLimits(max_response_length=100_000, max_model_len=100_000)
        key = TrajectoryKey(run_seed=0, split="train", step=1, prompt=0, sample=0)
        builder = TrajectoryBuilder(key, [QUESTION], TOOLS, ChatTemplateRenderer.of(renderer, parser), limits, sample)
        for added in ([RESULT], [{"role": "user", "content": "And <|im_end|>?"}], []):
            await builder.generate({})
            assert not added or builder.add_messages(added)
        return builder.finish(Termination.COMPLETED), builder.tree.template_mismatches

    return asyncio.run(converse())


@pytest.mark.parametrize(("name", "template"), EVERY)
def test_turns_in_frames_have_the_tokens_of_the_whole_conversation(name: str, template: str) -> None:
    path, parser = FOLDER / f"{template}.jinja", parser_of(name)
    framed, whole = renderer_of(path), renderer_of(path)
    whole.bridge.distrust("none")
    words: Message = {"role": "assistant", "content": "20 degrees."}
    turns = [said(framed, [QUESTION], CALLING), *[said(framed, [QUESTION, CALLING, RESULT], words)] * 2]
    for _ in range(2):
        assert rows_of(framed, parser, turns) == rows_of(whole, parser, turns)
    assert rows_of(framed, parser, turns)[1] == 0
