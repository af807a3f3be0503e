"""Another package adds a state to the tool agent without copying it."""

import asyncio
from typing import Any

from agentrl_core.api import AgentLoopBase, AgentLoopContext, Termination
from agentrl_loop_tool_agent.config import ToolAgentConfig
from agentrl_loop_tool_agent.loop import Episode, State, ToolAgentLoop
from agentrl_testing.contracts.scripted_session import LoopRun, tool_call


class CarefulEpisode(Episode):
    """Skips rows without a question, and lets the policy check every answer once."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.checked = False

    async def pending(self) -> State | None:
        if not self.raw_prompt[-1]["content"].endswith("?"):
            return self.terminated(Termination.SKIPPED)
        return await super().pending()

    async def generating(self) -> State | None:
        following = await super().generating()
        answered = following is None and self.termination is Termination.COMPLETED
        return self.checking if answered and not self.checked else following

    async def checking(self) -> State | None:
        self.checked = True
        return self.extend([{"role": "user", "content": "Are you sure?"}])


class CarefulLoop(ToolAgentLoop):
    episode = CarefulEpisode


def build(context: AgentLoopContext) -> AgentLoopBase:
    return CarefulLoop(ToolAgentConfig(), context)


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def test_a_new_state_runs_between_those_of_the_tool_agent() -> None:
    world = LoopRun(build, [tool_call("add", {"a": 2, "b": 2}), "It is 5.", "It is 4."], {"add": add})
    (row,) = asyncio.run(world.trajectory([{"role": "user", "content": "What is 2 + 2?"}]))
    assert [message["content"] for message in row.messages[-3:]] == ["It is 5.", "Are you sure?", "It is 4."]
    assert row.termination is Termination.COMPLETED and row.turn_texts[1:] == ["It is 5.", "It is 4."]


def test_skipped_before_anything_was_opened_asks_for_nothing() -> None:
    world = LoopRun(build, ["It is 4."], {"add": add})
    (row,) = asyncio.run(world.trajectory([{"role": "user", "content": "Hello."}]))
    assert row.termination is Termination.SKIPPED
    assert row.prompt_ids and not row.response_ids and not world.policy.requests
    assert not world.hosts["add"].opened


class SkipsLater(Episode):
    async def processing_tools(self) -> State | None:
        return self.terminated(Termination.SKIPPED)


def test_skipped_in_the_middle_keeps_what_was_sampled() -> None:
    class Loop(ToolAgentLoop):
        episode = SkipsLater

    world = LoopRun(
        lambda context: Loop(ToolAgentConfig(), context), [tool_call("add", {"a": 1, "b": 1})], {"add": add}
    )
    (row,) = asyncio.run(world.trajectory([{"role": "user", "content": "What is 1 + 1?"}]))
    assert row.termination is Termination.SKIPPED and any(row.response_mask)
