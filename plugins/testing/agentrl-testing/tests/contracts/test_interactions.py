import asyncio
import math

from agentrl_core.api import Interaction, InteractionTurn
from agentrl_testing.contracts import InteractionCase, InteractionContract

CONVERSATIONS = [[{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]]


class Good(Interaction):
    async def generate_response(self, instance_id, messages, **kwargs):
        return InteractionTurn(True, "", 1.0)


class Silent(Good):
    async def generate_response(self, instance_id, messages, **kwargs):
        return InteractionTurn(False, "")


class NanReward(Good):
    async def generate_response(self, instance_id, messages, **kwargs):
        return InteractionTurn(True, "", math.nan)


class Appends(Good):
    async def generate_response(self, instance_id, messages, **kwargs):
        messages.append({"role": "user", "content": "again"})
        return InteractionTurn(True, "")


class Shared(Good):
    asked = 0

    async def generate_response(self, instance_id, messages, **kwargs):
        self.asked += 1
        await asyncio.sleep(0)
        return InteractionTurn(False, str(self.asked))


class InfiniteScore(Good):
    async def calculate_score(self, instance_id, **kwargs):
        return math.inf


class StrictEnd(Good):
    def __init__(self, config, context):
        super().__init__(config, context)
        self.open = set()

    async def start_interaction(self, instance_id, **kwargs):
        self.open.add(instance_id)

    async def finalize_interaction(self, instance_id, **kwargs):
        self.open.remove(instance_id)


def test_every_check_catches_a_broken_interaction(spec, catches) -> None:
    def case(cls):
        return InteractionCase(spec("interaction", cls), conversations=CONVERSATIONS)

    catches(
        InteractionContract,
        {
            "test_answers_are_turns": [case(Silent), case(NanReward)],
            "test_conversation_is_left_alone": [case(Appends)],
            "test_trajectories_do_not_share_state": [case(Shared)],
            "test_score_is_a_number_or_none": [case(InfiniteScore)],
            "test_finalize_works_in_whatever_state": [case(StrictEnd)],
        },
    )
