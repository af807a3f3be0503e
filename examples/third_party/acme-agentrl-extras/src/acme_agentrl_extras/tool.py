"""The tool."""

from typing import Any

from acme_agentrl_extras.config import ConvertConfig
from agentrl_core.api import Tool, ToolError, ToolResponse, ToolResult, function_schema

METRES = {"mm": 0.001, "cm": 0.01, "m": 1.0, "km": 1000.0, "in": 0.0254, "ft": 0.3048, "mi": 1609.344}


class Convert(Tool):
    """Converts lengths between the units of :data:`METRES`."""

    config: ConvertConfig
    schema = function_schema(
        "acme_convert",
        "Converts a length from one unit to another.",
        {
            "value": {"type": "number"},
            "source": {"type": "string", "enum": list(METRES)},
            "target": {"type": "string", "enum": list(METRES)},
        },
    )

    async def execute(self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any) -> ToolResult:
        source, target = parameters["source"], parameters["target"]
        unknown = [unit for unit in (source, target) if unit not in METRES]
        if unknown:
            raise ToolError(f"unknown unit {unknown[0]!r}; allowed are {', '.join(METRES)}")
        length = float(parameters["value"]) * METRES[source] / METRES[target]
        return ToolResult(ToolResponse(f"{length:.{self.config.digits}g}"))
