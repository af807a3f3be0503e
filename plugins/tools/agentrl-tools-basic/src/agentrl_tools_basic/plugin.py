"""What the entry points name."""

from agentrl_core.api import PluginSpec
from agentrl_tools_basic.config import CalculatorConfig

CALCULATOR = PluginSpec(
    kind="tool",
    name="calculator",
    api_version=1,
    summary="evaluates an arithmetic expression",
    config=CalculatorConfig,
    factory="agentrl_tools_basic.calculator:Calculator",
)
