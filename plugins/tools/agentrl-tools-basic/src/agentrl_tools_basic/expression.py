"""Arithmetic on text, safe against what a model may write: nothing is executed, and every step is bounded."""

import ast
import math
import operator
import re
from collections.abc import Callable

from agentrl_core.api import ToolError
from agentrl_tools_basic.config import CalculatorConfig

Number = int | float

_FOREIGN = re.compile(r"[^0-9.eE+\-*/%() \t]")


def evaluate(expression: str, limits: CalculatorConfig) -> Number:
    """The value of an expression of numbers, ``+ - * / // % **`` and parentheses.

    The quotient of two integers that divide evenly is an integer.

    Raises:
        ToolError: it is no such expression, breaks a limit, or has no real, finite value.
    """
    expression = expression.strip()
    if len(expression) > limits.max_expression_length:
        raise ToolError(
            f"the expression has {len(expression)} characters, at most {limits.max_expression_length} are allowed"
        )
    if foreign := _FOREIGN.search(expression):
        raise ToolError(f"unexpected {foreign.group()!r}; allowed are numbers, + - * / // % ** and parentheses")
    try:
        tree = ast.parse(expression, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ToolError("not an arithmetic expression") from None
    try:
        return _Evaluator(limits).value(tree.body, limits.max_depth)
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("the result is too large") from None


def to_text(value: Number) -> str:
    """Whole numbers without a fraction, others with at most 15 significant digits."""
    return str(value) if isinstance(value, int) else f"{value + 0.0:.15g}"


class _Evaluator:
    def __init__(self, limits: CalculatorConfig) -> None:
        self.max_digits = limits.max_digits
        self.bound = 10**limits.max_digits

    def value(self, node: ast.expr, depth: int) -> Number:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return self._checked(node.value)
        if depth == 0:
            raise ToolError("the expression is nested too deeply")
        if isinstance(node, ast.BinOp):
            function = _power if isinstance(node.op, ast.Pow) else _BINARY.get(type(node.op))
            if function is not None:
                left, right = self.value(node.left, depth - 1), self.value(node.right, depth - 1)
                if function is _power:
                    self._check_power(left, right)
                return self._checked(function(left, right))
        if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
            return _UNARY[type(node.op)](self.value(node.operand, depth - 1))
        raise ToolError("not an arithmetic expression")

    def _checked(self, value: Number) -> Number:
        if isinstance(value, float) and not math.isfinite(value):
            raise ToolError("the result is too large")
        if abs(value) >= self.bound:
            raise ToolError(f"a number has more than {self.max_digits} digits")
        return value

    def _check_power(self, base: Number, exponent: Number) -> None:
        """Refuse an integer power before it is computed: |base| >= 2^(bits - 1), so the result has at least
        (bits - 1) * exponent bits."""
        if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
            if (base.bit_length() - 1) * exponent > self.bound.bit_length():
                raise ToolError(f"a number has more than {self.max_digits} digits")


def _divide(left: Number, right: Number) -> Number:
    if isinstance(left, int) and isinstance(right, int) and right != 0 and left % right == 0:
        return left // right
    return left / right


def _power(base: Number, exponent: Number) -> Number:
    value: Number | complex = base**exponent
    if isinstance(value, complex):
        raise ToolError("the result is not a real number")
    return value


_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_UNARY: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
