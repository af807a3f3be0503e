import pytest

from agentrl_testing.contracts import ToolCase, ToolContract
from agentrl_tools_basic.plugin import CALCULATOR


class TestCalculator(ToolContract):
    @pytest.fixture
    def plugin(self) -> ToolCase:
        return ToolCase(CALCULATOR, arguments={"expression": "6 * 7"}, expected="42")
