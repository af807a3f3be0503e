"""The calculator with a schema as long as that of tools in the wild: about 400 tokens."""

from agentrl_core.api import function_schema
from agentrl_tools_basic.calculator import Calculator
from agentrl_tools_basic.config import CalculatorConfig

_DESCRIPTION = (
    "Evaluates an arithmetic expression and returns the result as a number. Use it for every calculation with more "
    "than one digit, because a calculation in the head is often wrong. The expression may hold integers, decimal "
    "numbers, parentheses and the operators for addition, subtraction, multiplication, division, remainder and power. "
    "Names, functions, units and assignments are refused. If the expression is refused, the answer begins with the "
    "word Error and says what is wrong with it; write the expression again without the mistake and call the function "
    "once more. Do not call the function twice with the same expression, because the result will be the same. If a "
    "problem has several parts, calculate one part with each call and use the results in the next expression, instead "
    "of writing one long expression for everything at once."
)
_OPTIONAL = {
    "precision": {
        "type": "integer",
        "description": "how many digits after the decimal point the result should have; at most twelve",
        "minimum": 0,
        "maximum": 12,
    },
    "rounding": {
        "type": "string",
        "description": "what to do with the digits that are cut off, where a precision has been given",
        "enum": ["half_even", "half_up", "down", "up"],
    },
    "unit": {
        "type": "string",
        "description": "a unit that is written after the result as it is, for example kilometres; it changes nothing",
    },
    "explain": {
        "type": "boolean",
        "description": "whether the answer should list the intermediate results, one in each line, before the result",
    },
}


class VerboseCalculator(Calculator):
    """Evaluates an arithmetic expression."""

    config_class = CalculatorConfig
    schema = function_schema(
        "calculator",
        _DESCRIPTION,
        {"expression": {"type": "string", "description": "the expression, for example 37 * 45"}, **_OPTIONAL},
        required=["expression"],
    )
