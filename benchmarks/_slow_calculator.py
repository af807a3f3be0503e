"""The calculator behind a slow connection: half of the calls take more than 50 ms, one in twenty a second."""

import asyncio
import math
import random
from typing import Any

from agentrl_core.api import ToolResult
from agentrl_tools_basic.calculator import Calculator
from agentrl_tools_basic.config import CalculatorConfig

MEDIAN, SPREAD, SLOW_SHARE, SLOW = 0.05, 0.5, 0.05, 1.0


class SlowCalculator(Calculator):
    """Evaluates an arithmetic expression, after a while."""

    config_class = CalculatorConfig

    async def execute(self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any) -> ToolResult:
        dice = random.Random(instance_id)
        usual = dice.lognormvariate(math.log(MEDIAN), SPREAD)
        await asyncio.sleep(SLOW if dice.random() < SLOW_SHARE else usual)
        return await super().execute(instance_id, parameters, **execute_kwargs)
