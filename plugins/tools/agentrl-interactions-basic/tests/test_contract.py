import pytest

from agentrl_core.testing.contracts import InteractionCase, InteractionContract
from agentrl_interactions_basic.plugin import TUTOR


class TestTutor(InteractionContract):
    @pytest.fixture
    def plugin(self) -> InteractionCase:
        conversations = [[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "#### 5"}]]
        conversations.append([*conversations[0], {"role": "assistant", "content": "#### 4"}])
        return InteractionCase(TUTOR, conversations=conversations, kwargs={"ground_truth": "4"})
