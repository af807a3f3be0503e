"""Options of the tools."""

from dataclasses import dataclass

from agentrl_core.api import option


@dataclass
class CalculatorConfig:
    max_expression_length: int = option(200, ge=1, le=2000, unit="characters", help="longest expression")
    max_depth: int = option(100, ge=1, le=200, unit="operations", help="deepest nesting; 1 + 2 + 3 has depth 2")
    max_digits: int = option(30, ge=1, le=300, unit="digits", help="longest number, intermediate results included")
