import asyncio
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl_core.api import ToolContext, ToolError
from agentrl_tools_basic.calculator import Calculator
from agentrl_tools_basic.config import CalculatorConfig


def calculate(expression: Any, **config: Any) -> str:
    tool = Calculator(CalculatorConfig(**config), ToolContext("calculator"))
    return asyncio.run(tool.execute("one", {"expression": expression})).response.text


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("37 * 45", "1665"),
        (" 12-15 ", "-3"),
        ("2 + 3 * (4 - 1)", "11"),
        ("-(2 - 5)", "3"),
        ("+7 // 2", "3"),
        ("-7 % 3", "2"),
        ("2 ** 10", "1024"),
        ("2 ** -1", "0.5"),
        ("-2 ** 2", "-4"),
        ("74 / 2", "37"),
        ("74.0 / 2", "37"),
        ("1 / 8", "0.125"),
        ("0.1 + 0.2", "0.3"),
        ("1.5e3", "1500"),
        ("0 * -1.0", "0"),
        ("(-1) ** (10 ** 20)", "1"),
        ("10 ** 20 / 10", "10000000000000000000"),
    ],
)
def test_result(expression: str, result: str) -> None:
    assert calculate(expression) == result


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1 / 0", "division by zero"),
        ("5 % 0", "division by zero"),
        ("5.0 // 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("", "not an arithmetic expression"),
        ("2 +", "not an arithmetic expression"),
        ("2 2", "not an arithmetic expression"),
        ("e", "not an arithmetic expression"),
        ("2(3)", "not an arithmetic expression"),
        ("(-8) ** 0.5", "not a real number"),
        ("__import__('os')", "unexpected '_'"),
        ("2 ^ 3", "unexpected '\\^'"),
        ("3 × 4", "unexpected '×'"),
        ("1,000 + 1", "unexpected ','"),
        ("2\x00", "unexpected '\\\\x00'"),
        ("1e999", "too large"),
        ("1e308 * 10", "more than 30 digits"),
        ("10.0 ** 400", "too large"),
        ("9" * 31, "more than 30 digits"),
        ("10 ** 29 * 10", "more than 30 digits"),
        ("1 + " * 60 + "1", "characters"),
        ("(" * 250 + "1" + ")" * 250, "not an arithmetic expression"),
        ("-" * 101 + "1", "nested too deeply"),
    ],
)
def test_refused_with_a_message_for_the_model(expression: str, message: str) -> None:
    with pytest.raises(ToolError, match=message):
        calculate(expression, max_expression_length=max(200, 2 * expression.count("(") + 1))


@pytest.mark.parametrize("expression", ["9**9**9", "9**9**9**9", "2**(10**29)", "(10**29)**(10**29)", "10.5**(10**29)"])
def test_huge_powers_do_not_hang(expression: str) -> None:
    with pytest.raises(ToolError, match="more than 30 digits|too large"):
        calculate(expression)


def test_limits_come_from_the_config() -> None:
    assert calculate("99", max_digits=2) == "99"
    with pytest.raises(ToolError, match="more than 2 digits"):
        calculate("99 + 1", max_digits=2)
    assert calculate("1 + 2 + 3", max_depth=2) == "6"
    with pytest.raises(ToolError, match="nested too deeply"):
        calculate("1 + 2 + 3", max_depth=1)
    with pytest.raises(ToolError, match="has 3 characters, at most 2"):
        calculate("1+2", max_expression_length=2)


@pytest.mark.parametrize("parameters", [{}, {"expression": 5}, {"expression": "1", "x": 1}, {"formula": "1"}])
def test_bad_arguments_are_a_tool_error(parameters: dict[str, Any]) -> None:
    tool = Calculator(CalculatorConfig(), ToolContext("calculator"))
    with pytest.raises(ToolError, match='the string "expression"'):
        asyncio.run(tool.execute("one", parameters))


def test_schema() -> None:
    assert Calculator.schema == {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluates an arithmetic expression and returns the result.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string", "description": "the expression, for example 37 * 45"}},
                "required": ["expression"],
            },
        },
    }


EXPRESSIONS = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner).map(
        lambda parts: f"({parts[0]} {parts[1]} {parts[2]})"
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(EXPRESSIONS)
def test_integers_agree_with_python(expression: str) -> None:
    try:
        expected = eval(expression)
    except ZeroDivisionError:
        with pytest.raises(ToolError, match="division by zero"):
            calculate(expression)
        return
    assert calculate(expression, max_digits=100) == str(expected)


@settings(deadline=None)
@given(st.integers(-(10**20), 10**20), st.integers(1, 10**6))
def test_quotients_are_exact_or_close(left: int, right: int) -> None:
    quotient = Fraction(calculate(f"{left} / {right}"))
    assert abs(quotient - Fraction(left, right)) <= abs(Fraction(left, right)) / 10**14


@settings(deadline=None)
@given(st.text(st.sampled_from("0123456789.eE+-*/%() "), max_size=40) | st.text(max_size=20))
def test_any_text_gives_a_number_or_a_tool_error(expression: str) -> None:
    try:
        text = calculate(expression)
    except ToolError:
        return
    float(text)
