from typing import Any

import pytest

from agentrl_interactions_basic.config import SimulatedUserConfig
from agentrl_interactions_basic.plugin import SIMULATED_USER, TUTOR
from agentrl_testing.contracts import InteractionCase, InteractionContract


class TestTutor(InteractionContract):
    @pytest.fixture
    def plugin(self) -> InteractionCase:
        conversations = [[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "#### 5"}]]
        conversations.append([*conversations[0], {"role": "assistant", "content": "#### 4"}])
        return InteractionCase(TUTOR, conversations=conversations, kwargs={"ground_truth": "4"})


class Echoes:
    """A model that counts the messages that it read."""

    async def chat(self, messages: Any, **sampling: Any) -> str:
        return f"{len(messages)} messages so far"


class TestSimulatedUser(InteractionContract):
    @pytest.fixture
    def plugin(self) -> InteractionCase:
        conversations = [[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "5"}]]
        conversations.append([*conversations[0], {"role": "assistant", "content": "4"}])
        config = SimulatedUserConfig(engine="user", instructions="You want {goal}.")
        return InteractionCase(
            SIMULATED_USER,
            config=config,
            conversations=conversations,
            kwargs={"goal": "a sum"},
            engines={"user": Echoes()},
        )
