"""The calculator."""

from typing import Any

from agentrl_core.api import Tool, ToolError, ToolResponse, ToolResult, function_schema
from agentrl_tools_basic.config import CalculatorConfig
from agentrl_tools_basic.expression import evaluate, to_text


class Calculator(Tool):
    """Evaluates an arithmetic expression; see :func:`agentrl_tools_basic.expression.evaluate`.

    Runs inline: an evaluation is bounded to well under a millisecond.
    """

    config: CalculatorConfig
    schema = function_schema(
        "calculator",
        "Evaluates an arithmetic expression and returns the result.",
        {"expression": {"type": "string", "description": "the expression, for example 37 * 45"}},
    )

    async def execute(self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any) -> ToolResult:
        if set(parameters) != {"expression"} or not isinstance(parameters["expression"], str):
            raise ToolError('calculator takes one argument, the string "expression"')
        return ToolResult(ToolResponse(to_text(evaluate(parameters["expression"], self.config))))
