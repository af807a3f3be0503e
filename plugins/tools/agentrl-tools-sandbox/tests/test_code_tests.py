"""Scores of answers with code, and tests that a row has in the wrong form."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import RewardFunctionContext, RewardResult, RewardTrajectory
from agentrl_tools_sandbox.code_tests import CodeTests
from agentrl_tools_sandbox.config import CodeTestsConfig

SUMS = {"inputs": ["1 2\n", "3 4\n", "5 5\n"], "outputs": ["3\n", "7", "10 \n\n"]}
ADDS = "assert add(1, 2) == 3\nassert add(2, 2) == 4"


def scored(any_boundary: Any, folder: Path, text: str, tests: Any, **config: Any) -> RewardResult:
    options = CodeTestsConfig(**{"timeout": 20.0, **any_boundary, **config})
    trajectory = RewardTrajectory([], text, text, text, ground_truth=tests, data_source="code")
    result = asyncio.run(CodeTests(options, RewardFunctionContext("code_tests"))(trajectory))
    assert not list(folder.glob("agentrl-sandbox-*")), "no sandbox is left"
    return result


def block(code: str) -> str:
    return f"So:\n```python\n{code}\n```\nThat is it."


@pytest.mark.parametrize("form", [dict, json.dumps])
def test_a_program_passes_if_it_prints_what_is_expected(any_boundary: Any, folder: Path, form: Any) -> None:
    text = block("a, b = map(int, input().split())\nprint(a + b)")
    assert scored(any_boundary, folder, text, form(SUMS)) == RewardResult(1.0, metrics={"passed": 1.0, "no_code": 0.0})


def test_the_last_block_counts_and_part_of_the_tests_is_a_part_of_the_score(any_boundary: Any, folder: Path) -> None:
    text = block("print(0)") + block("a, b = map(int, input().split())\nif a == 5: raise ValueError\nprint(a + b)")
    assert scored(any_boundary, folder, text, SUMS).score == 0.0
    assert scored(any_boundary, folder, text, SUMS, partial=True).score == pytest.approx(2 / 3)
    assert scored(any_boundary, folder, text, SUMS, max_tests=2).score == 1.0


@pytest.mark.parametrize(
    ("code", "score"),
    [
        ("def add(a, b): return a + b", 1.0),
        ("def add(a, b): return 3", 0.0),
        ("def subtract(a, b): return a - b", 0.0),
        ("def add(a, b:", 0.0),
        ("import sys\nsys.exit(0)", 0.0),
        ("import os\nos._exit(0)", 0.0),
        ("print('ok')\ndef add(a, b): return a + b", 1.0),
    ],
)
def test_assertions(any_boundary: Any, folder: Path, code: str, score: float) -> None:
    assert scored(any_boundary, folder, block(code), ADDS).score == score


def test_code_that_does_not_end_fails_and_the_next_test_has_a_new_sandbox(any_boundary: Any, folder: Path) -> None:
    text = block("a, b = map(int, input().split())\nwhile a == 1: pass\nprint(a + b)")
    result = scored(any_boundary, folder, text, SUMS, timeout=0.5, partial=True)
    assert result.score == pytest.approx(2 / 3)


def test_an_answer_without_code_scores_nothing(any_boundary: Any, folder: Path) -> None:
    result = scored(any_boundary, folder, "print(3)", SUMS)
    assert result == RewardResult(0.0, metrics={"passed": 0.0, "no_code": 1.0})


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (None, "has no tests: found None"),
        ("  ", "has no tests"),
        (7, "found 7"),
        ("{'inputs': []}", "begins like JSON and is not"),
        ({"inputs": ["1"]}, "without as many inputs as outputs"),
        ({"inputs": [], "outputs": []}, "without as many inputs as outputs"),
        ({"inputs": ["1"], "outputs": [1]}, "which must be text"),
        ({"inputs": ["1"], "outputs": ["x" * 200]}, "a test expects 200 bytes of output; raise max_output"),
    ],
)
def test_a_row_without_usable_tests_is_an_error(any_boundary: Any, folder: Path, tests: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scored(any_boundary, folder, block("print(1)"), tests, max_output=100)
