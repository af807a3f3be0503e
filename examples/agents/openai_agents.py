"""An agent of the OpenAI Agents SDK: one tool, and the SDK's own loop of calls and answers."""

from typing import Literal

from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI


@function_tool
def calculator(a: int, operator: Literal["+", "-", "*"], b: int) -> int:
    """Calculates a + b, a - b or a * b."""
    return {"+": a + b, "-": a - b, "*": a * b}[operator]


async def solve(base_url, api_key, model, messages, row):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        agent = Agent("calculator", model=OpenAIChatCompletionsModel(model, client), tools=[calculator])
        await Runner.run(agent, messages, run_config=RunConfig(tracing_disabled=True))
