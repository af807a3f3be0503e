import pytest
from openai import AsyncOpenAI

from agentrl_loop_openai_agent.config import OpenAIAgentConfig
from agentrl_loop_openai_agent.plugin import PLUGIN
from agentrl_testing.contracts import AgentLoopCase, AgentLoopContract


async def solve(base_url, api_key, model, messages, row):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        for _ in range(3):
            answer = await client.chat.completions.create(model=model, messages=messages)
            messages = [*messages, answer.choices[0].message.model_dump(), {"role": "user", "content": "go on"}]


class TestOpenAIAgent(AgentLoopContract):
    @pytest.fixture
    def plugin(self) -> AgentLoopCase:
        return AgentLoopCase(PLUGIN, config=OpenAIAgentConfig(agent=solve))  # type: ignore[arg-type]
