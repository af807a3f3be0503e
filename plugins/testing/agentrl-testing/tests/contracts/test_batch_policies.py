import time

import pytest

from agentrl_core.api import BatchPolicy
from agentrl_core.rollout.deadline import DEADLINE, Deadline
from agentrl_testing.contracts import BatchPolicyCase, BatchPolicyContract


class TestDeadline(BatchPolicyContract):
    @pytest.fixture
    def plugin(self) -> BatchPolicyCase:
        return BatchPolicyCase(DEADLINE)


class InOrder(BatchPolicy):
    def __init__(self, config, context):
        pass

    def admit(self, state):
        return state.allowed

    def select(self, state):
        first = state.groups[: state.batch_size]
        ready = len(first) == state.batch_size and all(group.ended for group in first)
        return [group.position for group in first] if ready else None


class TestInOrder(BatchPolicyContract):
    @pytest.fixture
    def plugin(self, spec) -> BatchPolicyCase:
        return BatchPolicyCase(spec("batch_policy", InOrder))


class TakesBack(Deadline):
    """Below 0 where the batches that may start are full."""

    def admit(self, state):
        return state.allowed or -1


class ALittle(Deadline):
    def admit(self, state):
        return state.allowed / 2


class WhatRuns(InOrder):
    def select(self, state):
        first = state.groups[: state.batch_size]
        return [group.position for group in first] if len(first) == state.batch_size else None


class Smaller(Deadline):
    def select(self, state):
        ended = [group.position for group in state.groups if group.ended]
        return ended[: state.batch_size] or None


class Twice(Deadline):
    def select(self, state):
        ended = [group.position for group in state.groups if group.ended]
        return ended[:1] * state.batch_size if ended else None


class WhateverEnded(Deadline):
    def select(self, state):
        ended = [group.position for group in state.groups if group.ended]
        return ended[: state.batch_size] if len(ended) >= state.batch_size else None


class NewestFirst(Deadline):
    def select(self, state):
        ended = [group.position for group in reversed(state.groups) if group.ended]
        return ended[: state.batch_size] if len(ended) >= state.batch_size else None


class OneBatchAtOnce(Deadline):
    """Waits until more has ended than may start."""

    def select(self, state):
        ended = sum(group.ended for group in state.groups)
        return super().select(state) if ended > state.batch_size else None


class StartsNothing(Deadline):
    def admit(self, state):
        return 0


class EverySecondTime(InOrder):
    asked = 0

    def select(self, state):
        chosen = super().select(state)
        self.asked += chosen is not None
        return chosen if self.asked % 2 or all(group.ended for group in state.groups) else None


class GrowsSlowly(Deadline):
    started = 1

    def admit(self, state):
        self.started += 1
        return min(state.allowed, self.started)


class Sleeps(Deadline):
    def select(self, state):
        time.sleep(0.11)
        return super().select(state)


def test_every_check_catches_a_broken_policy(spec, catches) -> None:
    def case(cls):
        return BatchPolicyCase(spec("batch_policy", cls))

    catches(
        BatchPolicyContract,
        {
            "test_admits_a_number_of_groups": [case(TakesBack), case(ALittle)],
            "test_batches_are_groups_that_have_ended": [case(WhatRuns), case(Smaller), case(Twice)],
            "test_no_group_is_left_past_its_deadline": [case(WhateverEnded), case(NewestFirst)],
            "test_a_run_never_stops": [case(OneBatchAtOnce), case(StartsNothing)],
            "test_answers_depend_on_the_state_only": [case(EverySecondTime), case(GrowsSlowly)],
            "test_answers_come_at_once": [case(Sleeps)],
        },
    )
