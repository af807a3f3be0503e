"""The renderers against the chat templates that TRL's wheel ships."""

from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import ConfigError, TemplateError
from agentrl_renderers.config import FamilyConfig
from agentrl_renderers.family import FamilyRenderer
from agentrl_renderers.plugin import FAMILY, HARMONY
from agentrl_testing.contracts import RendererCase, RendererContract
from agentrl_testing.contracts.renderer import CALLING, QUESTION, RESULT, TOOLS
from agentrl_testing.tiny_model import renderer_context

FOLDER = Path(str(distribution("trl").locate_file("trl/chat_templates")))
THINK = ("<tool_response>", "</tool_response>", "<think>", "</think>", "<tools>", "</tools>")
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
GLM = ("[gMASK]", "<sop>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink")
FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "qwen3": ("qwen3", THINK),
    "qwen3.5": ("qwen3_5_think", (*THINK, *VISION)),
    "qwen3.6": ("qwen3_6", (*THINK, *VISION)),
    "glm-4.5": ("glm4moe", (*THINK, *GLM)),
    "nemotron-3": ("nemotron_3_nano", THINK),
    "llama-3": ("llama3_1", ("<|begin_of_text|>", "<|end_of_text|>", "<|python_tag|>", "<|eom_id|>")),
}


def template(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def family_case(family: str) -> RendererCase:
    name, tokens = FAMILIES[family]
    return RendererCase(FAMILY, config=FamilyConfig(family), context=renderer_context(template(name), tokens=tokens))


def harmony_case() -> RendererCase:
    stops = ("<|call|>", "<|return|>")
    return RendererCase(HARMONY, context=renderer_context(template("gptoss"), tokens=("<|constrain|>",), stops=stops))


class TestHarmony(RendererContract):
    @pytest.fixture
    def plugin(self) -> RendererCase:
        return harmony_case()


class TestFamily(RendererContract):
    @pytest.fixture(params=["qwen3", "qwen3.5", "llama-3"])
    def plugin(self, request: pytest.FixtureRequest) -> RendererCase:
        return family_case(request.param)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_writes_what_its_template_writes(family: str) -> None:
    case = family_case(family)
    for messages in ([QUESTION], [QUESTION, CALLING, RESULT]):
        own = case.renderer.render(messages, TOOLS, generation_prompt=True).text
        whole = case.context.chat.render(messages, TOOLS, generation_prompt=True)
        # The tiny tokenizer begins texts with a token of its own.
        assert own == whole.replace("<bos>", "<|begin_of_text|>")


def said(case: RendererCase, text: str) -> list[int]:
    return case.context.chat.encode(text)


def test_the_channels_of_a_turn() -> None:
    case = harmony_case()
    turn = said(
        case,
        "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant to=functions.forecast<|channel|>commentary "
        '<|constrain|>json<|message|>{"city": "Oslo"}<|call|>',
    )
    parsed = case.renderer.parse(turn, TOOLS)
    assert (parsed.content, parsed.reasoning, parsed.errors) == ("", "I look.", [])
    assert [(call.name, call.arguments) for call in parsed.calls] == [("forecast", {"city": "Oslo"})]
    assert parsed.fields == {"thinking": "I look."}
    answer = case.renderer.parse(said(case, "<|channel|>final<|message|>Rain.<|return|>"), TOOLS)
    assert (answer.content, answer.fields) == ("Rain.", {})


def test_the_analysis_stays_until_the_answer_and_an_answer_is_continued() -> None:
    case = harmony_case()
    call = said(
        case,
        "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant to=functions.forecast<|channel|>commentary "
        'json<|message|>{"city": "Oslo"}<|call|>',
    )
    conversation = case.after(call, case.renderer.parse(call, TOOLS))
    follow = case.renderer.bridge(conversation, [RESULT])
    assert follow is not None
    assert (
        follow.text
        == '<|start|>functions.forecast to=assistant<|channel|>commentary<|message|>"rainy"<|end|><|start|>assistant'
    )
    whole = case.renderer.render([*conversation.messages, RESULT], TOOLS, generation_prompt=True).text
    assert whole == conversation.text + follow.text

    answer = said(case, "<|channel|>final<|message|>Rain.<|return|>")
    follow = case.follow(answer, [{"role": "user", "content": "And <|end|>?"}])
    assert follow is not None and follow.text == "<|start|>user<|message|>And <|end|>?<|end|><|start|>assistant"
    assert follow.ids.count(case.context.tokenizer.convert_tokens_to_ids("<|end|>")) == 1


def test_control_tokens_are_tokens_and_their_names_are_text() -> None:
    case = harmony_case()
    letters = [token for letter in "<|call|>" for token in said(case, letter)]
    turn = [*said(case, "<|channel|>final<|message|>It says "), *letters, *said(case, " at the end<|return|>")]
    parsed = case.renderer.parse(turn, TOOLS)
    assert (parsed.content, parsed.errors) == ("It says <|call|> at the end", [])


@pytest.mark.parametrize(
    ("body", "error"),
    [("{", "no JSON"), ("[1]", "a JSON object"), ('{"a": 1} x', "no JSON")],
)
def test_a_bad_call_is_an_error_with_its_place(body: str, error: str) -> None:
    case = harmony_case()
    before = "<|channel|>analysis<|message|>I look.<|end|>"
    call = f"<|start|>assistant to=functions.forecast<|channel|>commentary json<|message|>{body}"
    parsed = case.renderer.parse(said(case, f"{before}{call}<|call|>"), TOOLS)
    assert error in parsed.errors[0] and not parsed.calls
    (span,) = parsed.error_spans
    assert parsed.text[slice(*span)] == call


def test_a_model_of_another_family_is_refused() -> None:
    with pytest.raises(TemplateError, match=r"format of gpt-oss, but the tokenizer of .* has no <\|start\|>"):
        _ = RendererCase(HARMONY, context=renderer_context()).renderer
    context: Any = renderer_context(template("gptoss"), tokens=("<|constrain|>",))
    with pytest.raises(TemplateError, match=r"must name \d+ in eos_token_id: <\|call\|>"):
        _ = RendererCase(HARMONY, context=context).renderer
    with pytest.raises(ConfigError, match=r"has no renderer 'qwen99'"):
        FamilyRenderer(FamilyConfig("qwen99"), renderer_context())
