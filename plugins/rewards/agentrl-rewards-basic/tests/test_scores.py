"""Examples with scores worked out by hand."""

import json
from typing import Any

import numpy as np
import pytest

from agentrl_core.api import NoConfig, RewardFunctionContext, RewardResult, RewardTrajectory
from agentrl_rewards_basic.config import (
    ExactMatchConfig,
    FuzzyMatchConfig,
    JsonSchemaConfig,
    LengthPenaltyConfig,
    RepetitionPenaltyConfig,
    TagsConfig,
)
from agentrl_rewards_basic.form import JsonSchema, Tags
from agentrl_rewards_basic.length import LengthPenalty, RepetitionPenalty
from agentrl_rewards_basic.text import ExactMatch, FuzzyMatch


def result(factory: Any, config: Any, text: str, truth: Any = None, **fields: Any) -> RewardResult:
    trajectory = RewardTrajectory([], text, text, text, ground_truth=truth, **fields)
    value = factory(config or NoConfig(), RewardFunctionContext("it"))(trajectory)
    return value if isinstance(value, RewardResult) else RewardResult(value)


@pytest.mark.parametrize(
    ("options", "text", "truth", "score"),
    [
        ({}, " new\n YORK ", "New York", 1.0),
        ({}, "\ufb01ve", "five", 1.0),  # a ligature
        ({}, "STRASSE", "Straße", 1.0),
        ({}, "New York.", "New York", 0.0),
        ({}, "The New York", "New York", 0.0),
        ({}, "", "New York", 0.0),
        ({}, "4", 4, 1.0),
        ({}, "NYC", ["New York", "nyc"], 1.0),
        ({"normalize": "squad"}, "The 'New York'.", "New York", 1.0),
        ({"normalize": "squad"}, "Theodore", "odore", 0.0),
        ({"tag": "answer"}, "<answer>Rome</answer> <answer>Paris</answer> ok", "paris", 1.0),
        ({"tag": "answer"}, "Paris", "Paris", 0.0),
        ({"tag": "answer"}, "<answer>Paris", "Paris", 0.0),
    ],
)
def test_exact_match(options: dict[str, Any], text: str, truth: Any, score: float) -> None:
    assert result(ExactMatch, ExactMatchConfig(**options), text, truth).score == score


def test_equal_answers_are_one_vote() -> None:
    assert {result(ExactMatch, ExactMatchConfig(), text, "x").answer for text in ("New York", " new  york")} == {
        "new york"
    }


@pytest.mark.parametrize("factory", [ExactMatch, FuzzyMatch])
def test_a_truth_of_which_normalisation_leaves_nothing_is_an_error(factory: Any) -> None:
    """Else every empty answer would be right."""
    with pytest.raises(ValueError, match="nothing is left of the ground truth 'A' of row 3"):
        result(factory, FuzzyMatchConfig(normalize="squad"), "", "A", extra_info={"index": 3})
    with pytest.raises(ValueError, match="has no reward_model.ground_truth"):
        result(factory, FuzzyMatchConfig(), "", [])


@pytest.mark.parametrize(
    ("threshold", "text", "truth", "score"),
    [
        (0.0, "kitten", "kitten", 1.0),
        (0.0, "bcd", "abcd", 6 / 7),  # 2 * 3 / (3 + 4)
        (0.0, "xyz", "abc", 0.0),
        (0.8, "bcd", "abcd", 6 / 7),
        (0.9, "bcd", "abcd", 0.0),
        (0.0, "bcd", ["zzz", "abcd"], 6 / 7),
    ],
)
def test_fuzzy_match(threshold: float, text: str, truth: Any, score: float) -> None:
    assert result(FuzzyMatch, FuzzyMatchConfig(threshold=threshold), text, truth).score == pytest.approx(score)


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"city": "Rome"}', 1.0),
        ('```json\n{"city": "Rome"}\n```', 1.0),
        ('{"city": 4}', 0.2),
        ("{}", 0.2),
        ("Rome", 0.0),
        ('{"city": "Rome"} Ok', 0.0),
        ("NaN", 0.0),
        ("[" * 100_000, 0.0),
        ("1" * 5000, 0.0),
        ("", 0.0),
    ],
)
def test_json_schema(text: str, score: float) -> None:
    assert result(JsonSchema, JsonSchemaConfig(SCHEMA, format_score=0.2), text).score == score
    row: Any = {"extra_info": {"json_schema": json.dumps(SCHEMA)}}
    assert result(JsonSchema, JsonSchemaConfig({"type": "null"}, format_score=0.2), text, **row).score == score


def test_equal_json_is_one_vote() -> None:
    answers = {
        result(JsonSchema, JsonSchemaConfig({}), text).answer for text in ('{"b":1,"a":2}', '{ "a": 2, "b": 1 }')
    }
    assert answers == {'{"a":2,"b":1}'}


@pytest.mark.parametrize(
    ("schema", "extra_info", "problem"),
    [
        (None, {}, "no extra_info.json_schema of row"),
        ({"type": "text"}, {}, "the option schema is not a JSON schema: 'text' is not valid"),
        ({}, {"json_schema": "{"}, "extra_info.json_schema of row .* is not a JSON schema"),
    ],
)
def test_json_schema_that_is_missing_or_wrong(schema: Any, extra_info: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        result(JsonSchema, JsonSchemaConfig(schema), "{}", extra_info=extra_info)


@pytest.mark.parametrize(
    ("options", "text", "score"),
    [
        ({}, "<think>a</think><answer>b</answer>", 1.0),
        ({}, "\n<think>\na\n</think>\n\n<answer>b < c</answer>\n", 1.0),
        ({}, "<think></think><answer></answer>", 1.0),
        ({}, "<answer>b</answer><think>a</think>", 0.0),
        ({}, "<think>a</think><answer>b", 0.0),
        ({}, "<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ({}, "<think>a<think>a</think><answer>b</answer>", 0.0),
        ({}, "<think>a<answer>b</answer></think><answer>b</answer>", 0.0),
        ({}, "So <think>a</think><answer>b</answer>", 0.0),
        ({}, " " * 50_000 + "<think>", 0.0),
        ({"prefilled": True}, "a</think><answer>b</answer>", 1.0),
        ({"prefilled": True}, "<think>a</think><answer>b</answer>", 0.0),
        ({"prefilled": True}, " " * 50_000, 0.0),
        ({"tags": ["a.b"]}, "<a.b>1</a.b>", 1.0),
        ({"tags": ["a.b"]}, "<a-b>1</a-b>", 0.0),
    ],
    ids=range(15),
)
def test_tags(options: dict[str, Any], text: str, score: float) -> None:
    assert result(Tags, TagsConfig(**options), text).score == score


@pytest.mark.parametrize(("longest", "cache"), [(20480, 4096), (10, 10), (7, 3)])
def test_length_penalty_is_equation_13_of_dapo(longest: int, cache: int) -> None:
    y = np.arange(1, longest + 3, dtype=np.float64)
    expected = np.select([y <= longest - cache, y <= longest], [0.0, ((longest - cache) - y) / cache], -1.0)
    config = LengthPenaltyConfig(max_length=longest, cache_length=cache)
    for index in {*range(0, len(y), 97), *range(len(y) - 12, len(y))}.intersection(range(len(y))):
        found = result(LengthPenalty, config, "text", sampled_tokens=int(y[index])).score
        assert found == pytest.approx(expected[index], abs=1e-15)


def test_length_penalty_in_characters() -> None:
    config = LengthPenaltyConfig(max_length=6, cache_length=4, unit="characters")
    assert [result(LengthPenalty, config, "x" * length).score for length in (2, 3, 6, 7)] == [0.0, -0.25, -1.0, -1.0]


def test_length_penalty_without_a_length_or_with_a_longer_cache_is_an_error() -> None:
    with pytest.raises(ValueError, match="has a text but no number of tokens"):
        result(LengthPenalty, LengthPenaltyConfig(max_length=6, cache_length=4), "text")
    with pytest.raises(ValueError, match="cache_length is 7, allowed are at most max_length = 6"):
        result(LengthPenalty, LengthPenaltyConfig(max_length=6, cache_length=7), "text")


@pytest.mark.parametrize(
    ("options", "text", "score"),
    [
        ({"n": 2}, "a b c d", 0.0),
        ({"n": 2}, "a b a b a", -0.5),  # ab ba ab ba: 2 of 4 are new
        ({"n": 1}, "a a a a", -0.75),
        ({"n": 3}, "a b", 0.0),
        ({"n": 3}, "", 0.0),
        ({"n": 1, "unit": "characters"}, "aab", -1 / 3),
    ],
)
def test_repetition_penalty(options: dict[str, Any], text: str, score: float) -> None:
    assert result(RepetitionPenalty, RepetitionPenaltyConfig(**options), text).score == pytest.approx(score)
