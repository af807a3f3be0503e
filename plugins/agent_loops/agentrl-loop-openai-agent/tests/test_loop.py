import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agentrl_core.api import AgentLoopContext, AgentLoopOutput, AgentRLError, ConfigError, Termination
from agentrl_loop_openai_agent.config import OpenAIAgentConfig
from agentrl_loop_openai_agent.loop import OpenAIAgentLoop
from agentrl_testing.loops import FakeSession, WordRenderer

CONTEXT = AgentLoopContext(WordRenderer(), None, (), (), 100)


class Endpoint:
    """One finished row, or what a test says."""

    base_url = "http://here/v1"

    def __init__(self, rows: int = 1, exhausted: bool = False, failure: Exception | None = None) -> None:
        self.rows, self.exhausted, self.failure = rows, exhausted, failure

    @asynccontextmanager
    async def open(self, session: Any, sampling_params: Any) -> AsyncIterator[tuple[str, "Endpoint"]]:
        yield "key", self

    def finish(self, termination: Termination) -> list[AgentLoopOutput]:
        if self.failure:
            raise self.failure
        return [AgentLoopOutput([1], [2], [1], [-0.5], termination) for _ in range(self.rows)]


def run(body: str, endpoint: Endpoint, **kwargs: Any) -> list[AgentLoopOutput]:
    module: dict[str, Any] = {}
    exec(f"async def solve(base_url, api_key, model, messages, row, **more):\n    {body}\n", module)
    loop = OpenAIAgentLoop(OpenAIAgentConfig(agent=module["solve"], kwargs=kwargs), CONTEXT)
    loop.server = endpoint  # type: ignore[assignment]
    prompt = [{"role": "user", "content": "hello"}]
    return asyncio.run(loop.run({}, session=FakeSession([]), raw_prompt=prompt, extra_info={"index": 3}))


def test_the_agent_gets_the_endpoint_the_prompt_the_row_and_its_options() -> None:
    check = (
        "assert (base_url, api_key, model) == ('http://here/v1', 'key', 'policy') and more == {'depth': 2} "
        "and messages[0]['content'] == 'hello' and row == {'extra_info': {'index': 3}}"
    )
    (output,) = run(check, Endpoint(), depth=2)
    assert output.termination is Termination.COMPLETED and output.reward_score is None


def test_a_number_that_it_returns_is_the_reward() -> None:
    outputs = run("return 0.25", Endpoint(rows=2))
    assert outputs[-1].reward_score == 0.25


def test_its_exception_fails_the_trajectory() -> None:
    with pytest.raises(ZeroDivisionError):
        run("1 / 0", Endpoint())


def test_the_engines_failure_goes_before_its_own() -> None:
    with pytest.raises(AgentRLError, match="gone"):
        run("1 / 0", Endpoint(failure=AgentRLError("gone")))


def test_its_exception_after_the_budget_was_spent_ends_with_length() -> None:
    (output,) = run("1 / 0", Endpoint(exhausted=True))
    assert output.termination is Termination.LENGTH


def test_an_agent_that_asked_nothing_is_an_error() -> None:
    with pytest.raises(AgentRLError, match="returned without asking the endpoint for anything"):
        run("pass", Endpoint(rows=0))


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ("solve", "expected 'package.module:function'"),
        ("no_such_package.agent:solve", "No module named"),
        ("json:solve", "has no attribute 'solve'"),
        ("json:dumps", "is not an async function"),
    ],
)
def test_an_agent_that_is_not_there_is_named(agent: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OpenAIAgentLoop(OpenAIAgentConfig(agent=agent), CONTEXT)
