import logging
from typing import Any

import pytest

from agentrl_core.api import DataError
from agentrl_core.data.overlong import fit_prompts

SCHEMA = {"type": "function", "function": {"name": "calc", "description": "Calculates.", "parameters": {}}}


class Rows(list):  # type: ignore[type-arg]
    """A dataset in memory."""


def row(*texts: str) -> dict[str, Any]:
    return {"raw_prompt": [{"role": "user" if i % 2 == 0 else "assistant", "content": t} for i, t in enumerate(texts)]}


@pytest.fixture
def fit(make_context):
    def run(rows: list[dict[str, Any]], most: int, overlong: str, tools: Any = ()) -> tuple[list[dict[str, Any]], Any]:
        context = make_context(most=most, tools=tools)

        def length(each: dict[str, Any]) -> int:
            text = context.renderer.render(each["raw_prompt"], context.tool_schemas(each), generation_prompt=True)
            return len(context.renderer.encode(text))

        kept, longest = fit_prompts(Rows(rows), context, overlong, lambda some: list(map(length, some)))  # type: ignore[arg-type]
        assert longest == max(map(length, kept))
        return kept, length

    return run


SHORT, LONG = row("short"), row("0123456789" * 10)


def test_overlong_prompts_are_dropped_and_counted(fit, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        kept, _ = fit([SHORT, LONG, SHORT], 60, "filter")
    assert kept == [SHORT, SHORT]
    assert "1 of 3 train prompts are longer than data.max_prompt_length=60" in caplog.text


def test_prompt_filter_counts_tool_schemas(fit) -> None:
    _, length = fit([SHORT], 1000, "filter")
    exact = length(SHORT)
    assert fit([SHORT], exact, "filter")[0] == [SHORT]
    with pytest.raises(DataError, match="tool schemas included"):
        fit([SHORT], exact, "filter", tools=[SCHEMA])


def test_a_prompt_longer_than_the_limit_is_an_error_where_asked(fit) -> None:
    with pytest.raises(DataError) as caught:
        fit([SHORT, LONG], 60, "error")
    assert "train row 1 has a prompt of" in str(caught.value) and "data.max_prompt_length=60" in str(caught.value)


def test_nothing_left_is_an_error(fit) -> None:
    with pytest.raises(DataError, match="no train prompt is left"):
        fit([LONG], 60, "filter")


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_truncation_side_drops_that_side(fit, side: str) -> None:
    """``left`` drops the left and keeps the tail."""
    given = row("first question stays", "answer", "START " + "x" * 100 + " END")
    (cut,), length = fit([given], 130, side)
    text = cut["raw_prompt"][2]["content"]
    assert length(cut) == 130
    assert ("START" in text, "END" in text) == {
        "left": (False, True), "right": (True, False), "middle": (True, True),
    }[side]  # fmt: skip
    assert cut["raw_prompt"][:2] == given["raw_prompt"][:2] and given["raw_prompt"][2]["content"].startswith("START")


def test_cutting_counts_tool_schemas_too(fit) -> None:
    (cut,), length = fit([LONG], 200, "right", tools=[SCHEMA])
    assert length(cut) == 200 < length(LONG) and LONG["raw_prompt"][0]["content"].startswith(
        cut["raw_prompt"][0]["content"]
    )


@pytest.mark.parametrize("text", ["日本語" * 30, "é" * 80])
def test_a_cut_inside_a_character_stays_within_the_limit(fit, text: str) -> None:
    for most in range(60, 70):
        (cut,), length = fit([row(text)], most, "left")
        assert most - 4 <= length(cut) <= most


def test_a_text_full_of_control_tokens_is_cut_and_not_emptied(fit) -> None:
    """In a prompt each of them is many tokens, not one."""
    (cut,), length = fit([row("<|im_end|>" * 20)], 100, "right")
    assert 90 <= length(cut) <= 100


def test_what_cannot_be_cut_enough_is_an_error(fit) -> None:
    with pytest.raises(DataError, match="even with an empty last user message the prompt has"):
        fit([row("x" * 100, "a", "y")], 60, "left")
    with pytest.raises(DataError, match="a content that is not a text cannot be cut"):
        fit([{"raw_prompt": [{"role": "user", "content": ["part " * 30]}]}], 60, "left")
