import asyncio
from typing import Any

import pytest

from agentrl_core.api import ConfigError, Engines, InteractionContext, InteractionTurn
from agentrl_interactions_basic.config import SimulatedUserConfig
from agentrl_interactions_basic.simulated_user import SimulatedUser, _from_the_other_side

CONVERSATION = [
    {"role": "system", "content": "You work for an airline."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look_up", "arguments": "{}"}}]},
    {"role": "tool", "content": "flight 12"},
    {"role": "assistant", "content": [{"type": "text", "text": "You are on flight 12."}]},
    {"role": "assistant", "content": "What now?"},
]


class Says:
    """A model that says these, one after the other."""

    def __init__(self, *replies: str) -> None:
        self.replies = list(replies)
        self.asked: list[dict[str, Any]] = []

    async def chat(self, messages: Any, **sampling: Any) -> str:
        self.asked.append({"messages": messages, **sampling})
        return self.replies.pop(0)


def replies(says: Says, turns: int = 1, /, **config: Any) -> list[InteractionTurn]:
    options = SimulatedUserConfig(**{"engine": "user", "instructions": "You want to {goal}.", **config})
    user = SimulatedUser(options, InteractionContext("simulated_user", engines=Engines({"user": says})))

    async def play() -> list[InteractionTurn]:
        await user.start_interaction("one", goal="cancel {it}")
        found = [await user.generate_response("one", CONVERSATION) for _ in range(turns)]
        assert await user.calculate_score("one") is None
        await user.finalize_interaction("one")
        return found

    return asyncio.run(play())


def test_the_model_reads_its_instructions_and_the_conversation_from_the_other_side() -> None:
    says = Says(" Cancel it. ")
    assert replies(says, temperature=0.5, max_tokens=9) == [InteractionTurn(False, "Cancel it.")]
    assert says.asked == [
        {
            "messages": [
                {"role": "system", "content": "You want to cancel {it}."},
                {"role": "assistant", "content": "Hello"},
                {"role": "user", "content": "You are on flight 12.\n\nWhat now?"},
            ],
            "temperature": 0.5,
            "max_tokens": 9,
        }
    ]


def test_the_user_reads_that_there_is_an_image() -> None:
    image = {"type": "image", "image": "0" * 32 + "-4x3.png"}
    told = [
        {"role": "assistant", "content": "Look."},
        {"role": "user", "content": [{"type": "text", "text": "At"}, image]},
    ]
    assert [each["content"] for each in _from_the_other_side(told)] == ["Look.", "At<image>"]


def test_the_user_ends_the_conversation() -> None:
    assert replies(Says("Thanks! [DONE] and more")) == [InteractionTurn(True, "Thanks!")]
    assert replies(Says("[DONE]")) == [InteractionTurn(True, "")]
    assert replies(Says("bye"), done="bye") == [InteractionTurn(True, "")]


def test_replies_are_limited() -> None:
    turns = replies(Says("a", "b"), 3, max_replies=2)
    assert turns == [InteractionTurn(False, "a"), InteractionTurn(False, "b"), InteractionTurn(True, "")]


def test_an_empty_reply_is_asked_for_again_and_not_greedily() -> None:
    says = Says(" ", "yes")
    assert replies(says, temperature=0.0) == [InteractionTurn(False, "yes")]
    assert [each["temperature"] for each in says.asked] == [0.0, 1.0]
    with pytest.raises(ValueError, match="the engine 'user' gave 3 empty replies"):
        replies(Says("", "", ""))


def test_a_row_without_a_field_of_the_instructions_is_named() -> None:
    with pytest.raises(ValueError, match=r"interaction_kwargs of the row has no name, .*; it has goal"):
        replies(Says(), instructions="You are {name} and want to {goal}.")


def test_an_unknown_engine_is_an_error() -> None:
    config = SimulatedUserConfig(engine="nobody", instructions="x")
    with pytest.raises(ConfigError, match="asks for the engine 'nobody'"):
        SimulatedUser(config, InteractionContext("simulated_user"))
