"""One trajectory on the screen: the mask is seen, and the model's text cannot drive the terminal."""

import io
import json
from typing import Any

import pytest
from rich.console import Console

from agentrl_core.api.message_parts import image_part
from agentrl_core.runs.records import RolloutRecord, to_json
from agentrl_core.runs.trajectory_view import show_trajectory


def shown(color: bool = False, max_chars: int | None = None, **changes: Any) -> str:
    values: dict[str, Any] = {
        "step": 10, "split": "train", "uid": "p1", "trajectory_id": "p1-0", "prompt_ids": [1, 2],
        "response_ids": [3, 4, 5], "response_mask": [1, 0, 1], "prompt_text": "What is 37 * 45?",
        "segments": [(1, "CALL"), (0, "TOOL"), (1, "ANSWER")],
    }  # fmt: skip
    file = io.StringIO()
    console = Console(
        file=file, width=120, force_terminal=color, color_system="standard" if color else None, _environ={}
    )
    show_trajectory(RolloutRecord(**{**values, **changes}), console, max_chars)
    return file.getvalue()


def test_without_colour_brackets_enclose_what_was_sampled() -> None:
    assert "What is 37 * 45?⟦CALL⟧TOOL⟦ANSWER⟧" in shown()


def test_with_colour_each_part_has_its_own() -> None:
    text = shown(color=True)
    for part in ("\x1b[2mWhat is 37 * 45?", "\x1b[1;32mCALL", "\x1b[33mTOOL", "\x1b[1;32mANSWER"):
        assert part in text
    assert "⟦" not in text


def test_facts_stand_below() -> None:
    text = shown(
        tool_schemas=[{"type": "function", "function": {"name": "calculator", "parameters": {
            "type": "object", "properties": {"expression": {"type": "string"}}}}}],
        tool_calls=[
            {"name": "calculator", "arguments": {"expression": "37 * 45"}, "response": "1665", "failed": False},
            {"name": "calculatr", "arguments": {}, "response": "no such tool", "failed": True},
        ],
        reward=1.0, reward_metrics={"exact": 1.0}, advantage=0.72, ground_truth="1665", turn_scores=[0.5],
        response_logprobs=[-0.1, 0.0, -0.3], policy_versions=[9, -1, 9], num_turns=4, termination="length",
        timings={"generate": 0.21, "tools": 0.004, "queue": 75.0}, error="RewardError: boom",
    )  # fmt: skip
    for part in (
        "calculator(expression)", "calculator(expression=37 * 45) → 1665", "calculatr() → no such tool  failed",
        "reward      1.00  exact 1.00  turn scores 0.50  advantage +0.72  ground truth 1665", "length after 4 turns",
        "RewardError: boom", "prompt 2  response 3  sampled 2  mean log-prob -0.200  policy version 9",
        "generate 0.21 s  tools 4.00 ms  queue 1m15s",
    ):  # fmt: skip
        assert part in text


def test_a_trajectory_without_tokens_and_reward_is_shown() -> None:
    text = shown(response_ids=[], response_mask=[], response_logprobs=[], segments=[], termination="engine_error")
    assert "engine_error" in text and "reward  none" in text


def test_a_record_that_held_nan_is_shown_after_reading() -> None:
    nan = float("nan")
    content = json.loads(
        to_json(RolloutRecord(
            step=1, split="train", uid="p", trajectory_id="p", prompt_ids=[], response_ids=[1, 2], reward=nan,
            response_mask=[1, 1], response_logprobs=[nan, -0.5], reward_metrics={"a": nan}, turn_scores=[nan],
        ).content)
    )  # fmt: skip
    text = shown(**content)
    assert "none  a none  turn scores none" in text and "mean log-prob -0.500" in text


@pytest.mark.parametrize("field", ["prompt_text", "segments", "tool_calls", "uid", "ground_truth", "error"])
def test_escape_sequences_of_a_model_do_not_reach_the_terminal(field: str) -> None:
    evil = "\x1b[2J\x07\x9b[bold]\u202e\ud800"
    values: dict[str, Any] = {
        "segments": [(1, evil)],
        "tool_calls": [{"name": evil, "arguments": {evil: evil}, "response": evil, "failed": False}],
    }
    text = shown(**{field: values.get(field, evil)})
    assert "[bold]" in text
    assert not set("\x1b\x07\x9b\u202e\ud800") & set(text)


def test_long_texts_can_be_shortened() -> None:
    text = shown(segments=[(1, "a" * 50 + "b" * 1000 + "c" * 50)], max_chars=100)
    lines = " ".join(line.strip("│ ") for line in text.splitlines())
    assert f"{'a' * 50} … 1,000 characters left out … {'c' * 50}" in " ".join(lines.split())


def test_brackets_in_a_tools_name_and_arguments_are_shown() -> None:
    schema = {"function": {"name": "search", "parameters": {"properties": {"[bold]query": {}}}}}
    call = {"name": "search", "arguments": {"q": "[ray]"}, "response": "[/b]", "failed": False}
    text = shown(tool_schemas=[schema], tool_calls=[call], timings={"tools[ray]": 1.0})
    assert "search([bold]query)" in text and "search(q=[ray]) → [/b]" in text and "tools[ray] 1.00 s" in text


def test_images_are_named() -> None:
    name, other = "3f2a" + "0" * 28 + "-640x480.png", "1" * 32 + "-8x6.jpeg"
    content = [{"type": "image", "image": name}, {"type": "text", "text": "?"}, {"type": "image", "image": "odd"}]
    text = shown(messages=[{"role": "user", "content": content}, {"role": "tool", "content": [image_part(other)]}])
    assert "<image 3f2a… 640x480>" in text and "<image 1111… 8x6>" in text and "odd" not in text
