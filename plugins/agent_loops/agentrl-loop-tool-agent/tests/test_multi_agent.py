"""Several agents, each with its own conversation."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from agentrl_core.api import (
    AgentLoopContext,
    AgentLoopOutput,
    ConfigError,
    Interaction,
    InteractionContext,
    InteractionTurn,
    Message,
    NoConfig,
    Termination,
)
from agentrl_loop_tool_agent.config import MultiAgentConfig
from agentrl_loop_tool_agent.multi_agent import MultiAgentLoop
from agentrl_testing.contracts.scripted_session import LoopRun, tool_call

PROMPT: list[Message] = [{"role": "system", "content": "Play."}, {"role": "user", "content": "You begin."}]


class Passes(Interaction):
    """The first agent, who has no name here, and a guest speak in turns."""

    def __init__(self, turns: int = 4) -> None:
        super().__init__(NoConfig(), InteractionContext("partner"))
        self.turns, self.heard = turns, list[list[str]]()

    async def generate_response(
        self, instance_id: str, messages: Sequence[dict[str, Any]], **kwargs: Any
    ) -> InteractionTurn:
        self.heard.append([message["content"] for message in messages])
        count = len(self.heard)
        return InteractionTurn(count == self.turns, f"news {count}", agent="guest" if count % 2 else "host")


def play(
    interaction: Interaction, turns: Sequence[str], budget: int = 500, tools: Any = None, **config: Any
) -> list[AgentLoopOutput]:
    def build(context: AgentLoopContext) -> MultiAgentLoop:
        return MultiAgentLoop(MultiAgentConfig(**config), context)

    world = LoopRun(build, turns, tools or {}, interaction, max_response_length=budget)
    return asyncio.run(world.trajectory(PROMPT))


def test_each_agent_has_its_own_row_and_texts() -> None:
    partner = Passes()
    rows = play(partner, ["a", "b", "c", "d"])
    assert [(row.agent, row.turn_texts) for row in rows] == [("", ["a"]), ("guest", ["b", "d"]), ("host", ["c"])]
    assert partner.heard == [
        ["Play.", "You begin.", "a"],
        ["Play.", "news 1", "b"],
        ["Play.", "news 2", "c"],
        ["Play.", "news 1", "b", "news 3", "d"],
    ]
    assert all(row.termination is Termination.COMPLETED and row.trained for row in rows)
    assert [turn for row in rows for turn in sorted(set(row.turn_ids) - {-1})] == [0, 0, 1, 0]


def test_only_the_named_agents_are_trained() -> None:
    rows = play(Passes(), ["a", "b", "c", "d"], trained=["guest"])
    assert {row.agent: row.trained for row in rows} == {"": False, "guest": True, "host": False}


def test_limits_hold_for_all_agents_together() -> None:
    rows = play(Passes(), ["a", "b", "c", "d"], max_assistant_turns=2)
    assert [row.turn_texts for row in rows] == [["a"], ["b"]]
    assert {row.termination for row in rows} == {Termination.MAX_TURNS}


def test_each_row_has_the_whole_budget() -> None:
    rows = play(Passes(20), ["word word"] * 20, budget=60)
    assert rows[-1].termination is Termination.LENGTH
    assert all(len(row.response_ids) <= 60 for row in rows) and sum(len(row.response_ids) for row in rows) > 60


def test_agents_may_call_tools() -> None:
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    rows = play(Passes(2), ["a", tool_call("add", {"a": 2, "b": 40}), "42"], tools={"add": add})
    assert [message["role"] for message in rows[1].messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert "42" in rows[1].full_text and "42" not in rows[0].full_text


def test_nobody_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="trained is empty; name an agent"):
        play(Passes(), ["a"], trained=[])
