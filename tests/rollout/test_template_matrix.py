"""Chat templates shaped like those of real models, driven through whole conversations."""

import asyncio
from typing import Any

import pytest

from agentrl_core.api import TemplateError, Termination
from agentrl_core.data.renderer import HFChatRenderer
from agentrl_core.data.template_check import check_template, require_tool_role

USER = {"role": "user", "content": "question one"}
CALL = '<tool_call>\n{"name": "calc", "arguments": {"x": "1 + 1"}}\n</tool_call>'
TOOLS = [
    {"role": "tool", "name": "calc", "tool_call_id": "call00001", "content": "first result"},
    {"role": "tool", "name": "calc", "tool_call_id": "call00002", "content": "second result"},
]
NEXT = {"role": "user", "content": "question two"}

KWARGS: dict[str, dict[str, Any]] = {"keyword": {"effort": "high"}}
EVERY = (
    "qwen2", "qwen3", "llama3", "mistral", "gemma", "phi", "hermes", "deepseek", "chatglm", "plain", "trims",
    "respaced", "keyword",
)  # fmt: skip
WITH_TOOL_ROLE = tuple(name for name in EVERY if name not in ("gemma", "phi"))
APPEND_ONLY = ("qwen2", "gemma", "phi", "hermes", "chatglm", "plain", "trims", "respaced", "keyword")
STOPS = {"llama3": "<|eot_id|>", "mistral": "</s>", "gemma": "<end_of_turn>", "phi": "<|end|>", "deepseek": "</s>"}


def stop_of(name: str) -> str:
    return {**STOPS, "chatglm": "<|user|>", "plain": "</s>"}.get(name, "<|im_end|>")


@pytest.mark.parametrize("name", EVERY)
def test_append_only_templates_are_told_from_those_that_rewrite_history(render_with, name: str) -> None:
    report = check_template(render_with(name, **KWARGS.get(name, {})))
    assert report.append_only == (name in APPEND_ONLY), report.breaks
    assert report.tool_role == (name in WITH_TOOL_ROLE)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("qwen3", "a user message after an answer with reasoning"),
        ("llama3", "text beside a call: dropped from the history"),
        ("deepseek", "reasoning: dropped from the history"),
        ("deepseek", "an answer: its turn does not begin in the history as it was prompted"),
        ("mistral", "a user message after a tool was used"),
    ],
)
def test_the_report_says_where_history_is_rewritten(render_with, name: str, reason: str) -> None:
    assert any(reason in found for found in check_template(render_with(name)).breaks)


@pytest.mark.parametrize("name", EVERY)
def test_the_stop_tokens_hold_what_the_template_ends_a_turn_with(render_with, name: str) -> None:
    renderer = render_with(name, **KWARGS.get(name, {}))
    assert renderer.encode(stop_of(name))[0] in renderer.stop_token_ids


@pytest.mark.parametrize("name", ["gemma", "phi"])
def test_template_that_rejects_the_tool_role_is_a_startup_error(render_with, name: str) -> None:
    with pytest.raises(TemplateError, match="chat template rejects the tool role.*set model.chat_template"):
        require_tool_role(render_with(name))


def test_the_reason_of_a_rejected_tool_role_is_the_tool_role_and_not_the_system_prompt(render_with) -> None:
    """This one rejects system messages loudly and drops tool messages in silence."""
    renderer = render_with("phi")
    renderer.tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        + renderer.tokenizer.chat_template
    )
    with pytest.raises(TemplateError, match="the content of tool messages does not appear"):
        require_tool_role(renderer)


@pytest.mark.parametrize("name", WITH_TOOL_ROLE)
def test_a_template_that_takes_the_tool_role_passes(render_with, name: str) -> None:
    require_tool_role(render_with(name, **KWARGS.get(name, {})))


def test_a_template_kwarg_reaches_every_rendering(render_with, conversation) -> None:
    """Lost template kwargs have broken system-prompt handling elsewhere."""
    with pytest.raises(TemplateError, match="effort must be given"):
        render_with("keyword").render([USER])
    talk = conversation(["answer<|im_end|>", "more<|im_end|>"], template="keyword", effort="high")
    asyncio.run(talk.builder.generate({}))
    assert talk.builder.add_messages([NEXT])
    assert talk.text.count("effort=high") == 4


@pytest.mark.parametrize("name", [name for name in EVERY if name != "deepseek"])
@pytest.mark.parametrize("spoken", ["an answer", "  an answer \n"])
@pytest.mark.parametrize("stopped", [True, False])
def test_questions_and_answers_append(conversation, name: str, spoken: str, stopped: bool) -> None:
    """Two questions; the policy's words, white space included, stay; the template's words are there once."""
    stop = stop_of(name) if stopped else ""
    talk = conversation([spoken + stop] * 2, template=name, tools=(), messages=[USER], **KWARGS.get(name, {}))
    asyncio.run(talk.builder.generate({}))
    assert talk.builder.add_messages([NEXT])
    asyncio.run(talk.builder.generate({}))
    assert talk.builder.template_breaks == 0
    (first, *_), (second, *_) = talk.policy.requests
    sampled = talk.renderer.encode(spoken + stop)
    assert second[: len(first) + len(sampled)] == first + sampled
    text = talk.text
    assert text.count("question one") == text.count("question two") == 1
    assert text.count("an answer") == 2
    assert text.startswith(talk.renderer.render([USER], generation_prompt=True))
    if spoken == "an answer" and name not in ("plain", "chatglm", "mistral"):
        assert text == talk.renderer.render(talk.builder.messages[:3], generation_prompt=True) + spoken + stop


@pytest.mark.parametrize("name", [name for name in WITH_TOOL_ROLE if name not in ("llama3", "deepseek")])
@pytest.mark.parametrize("calls", [CALL * 2, CALL.replace('": "', '":"') * 2])
def test_consecutive_tool_messages_rendered_together_equal_the_full_render(conversation, name: str, calls: str) -> None:
    """Also where the template writes the call in other words than the policy did."""
    talk = conversation(
        [calls + stop_of(name), "an answer" + stop_of(name)], template=name, messages=[USER], **KWARGS.get(name, {})
    )
    turn = asyncio.run(talk.builder.generate({}))
    assert len(turn.tool_calls) == 2
    assert talk.builder.add_messages(TOOLS)
    assert talk.builder.template_breaks == 0
    full = talk.renderer.render(talk.builder.messages, [talk.builder._tools[0]], generation_prompt=True)
    added = talk.builder.row.segments[-1][1]
    assert full.endswith(added)
    assert added.index("first result") < added.index("second result")
    assert talk.text.count("first result") == talk.text.count("second result") == 1
    assert talk.text == talk.renderer.render([USER], [talk.builder._tools[0]], generation_prompt=True) + (
        calls + stop_of(name) + added
    )


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "hermes", "trims", "respaced"])
def test_the_boundary_after_a_turn_is_the_templates_own(conversation, name: str) -> None:
    talk = conversation([CALL + "<|im_end|>"], template=name, messages=[USER])
    asyncio.run(talk.builder.generate({}))
    talk.builder.add_messages(TOOLS)
    assert talk.builder.row.segments[-1][1].startswith("\n<|im_start|>")


def test_a_turn_that_ends_with_another_stop_token_is_not_repeated(conversation) -> None:
    """This template ends a call with <|eom_id|>, while the policy said <|eot_id|>, which ends the user's turn too."""
    talk = conversation([CALL + "<|eot_id|>"], template="llama3", messages=[USER])
    asyncio.run(talk.builder.generate({}))
    assert talk.builder.add_messages(TOOLS[:1])
    added = talk.builder.row.segments[-1][1]
    assert added.startswith("<|start_header_id|>ipython") and added.count("first result") == 1
    assert talk.text.count("calc") == 2  # the schema and the call


def test_the_token_that_ended_a_turn_is_not_repeated_as_the_head_of_the_next(conversation) -> None:
    talk = conversation([CALL + "<|user|>"], template="chatglm", messages=[USER])
    asyncio.run(talk.builder.generate({}))
    assert talk.builder.add_messages([NEXT])
    assert talk.builder.row.segments[-1][1] == "\nquestion two<|assistant|>\n"


def test_a_trailing_eos_of_the_whole_conversation_is_not_appended(conversation) -> None:
    talk = conversation([" an answer<|end|>"] * 2, template="phi", tools=(), messages=[USER])
    asyncio.run(talk.builder.generate({}))
    assert talk.builder.add_messages([NEXT])
    assert "<|endoftext|>" not in talk.text


def test_system_prompt_stays_once(conversation) -> None:
    for name in EVERY:
        if name in ("gemma", "mistral"):
            continue
        system = {"role": "system", "content": "be brief"}
        talk = conversation(
            ["an answer" + stop_of(name)], template=name, messages=[system, USER], tools=(), **KWARGS.get(name, {})
        )
        asyncio.run(talk.builder.generate({}))
        assert talk.builder.add_messages([NEXT])
        assert talk.text.count("be brief") == 1, name


THOUGHT = "<think>\nhm\n</think>\n\nan answer<|im_end|>"


def test_policy_fork_starts_a_row_where_the_template_drops_reasoning(conversation) -> None:
    talk = conversation([THOUGHT, "more<|im_end|>"], template="qwen3", tools=(), messages=[USER])
    asyncio.run(talk.builder.generate({}))
    assert talk.builder.add_messages([NEXT])
    asyncio.run(talk.builder.generate({}))
    first, second = talk.builder.finish(Termination.COMPLETED)
    assert talk.renderer.decode(first.response_ids) == THOUGHT and all(first.response_mask)
    assert "hm" not in talk.renderer.decode(second.prompt_ids)
    assert talk.renderer.decode(second.response_ids) == "more<|im_end|>"
    assert first.trajectory_id == second.trajectory_id
    used = len(first.response_ids) + len(second.response_ids)
    assert second.tokens.leaf.used == used and talk.builder.remaining == 10_000 - used
    assert talk.builder.template_breaks == 1
    assert "hm" in second.full_text and "question two" in second.full_text


def test_policy_mask_keeps_one_row_that_trains_the_last_turns(conversation) -> None:
    talk = conversation([THOUGHT, "more<|im_end|>"], template="qwen3", tools=(), messages=[USER], template_break="mask")
    asyncio.run(talk.builder.generate({}))
    assert talk.builder.add_messages([NEXT])
    asyncio.run(talk.builder.generate({}))
    output = talk.builder.finish(Termination.COMPLETED)
    assert talk.renderer.decode(output.response_ids) == "more<|im_end|>"
    assert output.prompt_ids == talk.renderer.encode(
        talk.renderer.render(talk.builder.messages[:-1], generation_prompt=True)
    )


def test_policy_error_names_doctor_and_the_alternatives(conversation) -> None:
    talk = conversation([THOUGHT], template="qwen3", tools=(), messages=[USER], template_break="error")
    asyncio.run(talk.builder.generate({}))
    with pytest.raises(TemplateError, match="agentrl doctor.*template_break to fork or mask"):
        talk.builder.add_messages([NEXT])


@pytest.mark.parametrize(
    ("name", "spoken", "added"),
    [
        ("deepseek", "hm</think>an answer</s>", NEXT),
        ("llama3", f"let me see {CALL}<|eom_id|>", TOOLS[0]),
        ("mistral", "an answer</s>", NEXT),
    ],
)
def test_templates_that_rewrite_history_are_handled_by_the_policy(conversation, name, spoken, added) -> None:
    talk = conversation([spoken], template=name, messages=[USER])
    asyncio.run(talk.builder.generate({}))
    assert talk.builder.add_messages([added])
    assert talk.builder.template_breaks == 1


def test_messages_twice_without_a_turn_between_do_not_leave_an_open_turn(conversation) -> None:
    talk = conversation(["an answer<|im_end|>", "more<|im_end|>"], template="qwen2", messages=[USER])
    asyncio.run(talk.builder.generate({}))
    talk.builder.add_messages(TOOLS[:1])
    talk.builder.add_messages([NEXT])
    assert talk.text == talk.renderer.render(talk.builder.messages, [talk.builder._tools[0]], generation_prompt=True)


def test_thinking_switched_off_by_a_template_kwarg(conversation) -> None:
    renderer: HFChatRenderer = conversation([], template="qwen3", enable_thinking=False).renderer
    assert renderer.render([USER], generation_prompt=True).endswith("<think>\n\n</think>\n\n")
