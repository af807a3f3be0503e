"""The contract of batch policies."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TypeVar

import pytest

from agentrl_core.api import BatchPolicy, BatchPolicyContext, PendingGroup, PipelineState
from agentrl_testing.contracts.case import PluginCase, PluginContract

T = TypeVar("T", int, Sequence[int] | None)

BOUNDS = tuple(
    BatchPolicyContext(size, staleness, depth)
    for size, (staleness, depth) in product((1, 3), ((1, 0), (1, 1), (2, 1), (4, 1), (4, 2), (3, 3)))
)
"""Batch sizes, staleness and depth of the runs."""
RUNS = 12
"""With each of them."""
BATCHES = 12
MANY = BatchPolicyContext(512, 8, 8)
SECONDS = 0.1
"""What a call may take with the groups of ``MANY``."""


@dataclass(kw_only=True)
class BatchPolicyCase(PluginCase):
    """A batch policy under test."""

    def make(self, context: BatchPolicyContext) -> BatchPolicy:
        """The policy as the trainer builds it."""
        policy: BatchPolicy = self.build(context)
        return policy


@dataclass(frozen=True)
class Call:
    """What a policy was asked, and what it answered: how many groups start, or which ones make the batch."""

    state: PipelineState
    answer: int | Sequence[int] | None


@dataclass
class Schedule:
    """A run of some batches: how long each group and each update takes follows from the seed.

    Groups start and end as in a run, some of them many times slower than the others. ``calls`` has all that the policy
    was asked.
    """

    policy: BatchPolicy
    context: BatchPolicyContext
    seed: int
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._version, self._training, self._started = 0, False, 0
        self._groups: dict[int, PendingGroup] = {}
        self._left: dict[int, int] = {}
        self._update_left = 0

    def play(self) -> list[Call]:
        """Run to the last batch, or to the first that is no batch; returns all calls.

        Raises:
            AssertionError: everything waits for the policy.
        """
        while self._version < BATCHES:
            self._admit()
            if not self._training and (chosen := self._ask(self.policy.select)) is not None:
                if not is_batch(self.calls[-1]):
                    break
                for position in chosen:
                    del self._groups[position]
                self._training, self._update_left = True, self._random.randrange(6)
                self._admit()
            elif not self._left and not self._training:
                raise AssertionError(
                    f"nothing runs, and the policy starts nothing and chooses nothing of {self._state}"
                )
            self._pass_time()
        return self.calls

    @property
    def _state(self) -> PipelineState:
        context, groups = self.context, [group for _, group in sorted(self._groups.items())]
        size, staleness, depth = context.batch_size, context.max_staleness, context.pipeline_depth
        return PipelineState(self._version, self._training, size, staleness, depth, groups)

    def _ask(self, question: Callable[[PipelineState], T]) -> T:
        state = self._state
        answer = question(state)
        self.calls.append(Call(state, answer))
        return answer

    def _admit(self) -> None:
        count = self._ask(self.policy.admit)
        state = self._state
        # As many as are trained until the run ends, as in a run.
        most = (BATCHES - state.next_batch) * self.context.batch_size - len(self._groups)
        for _ in range(int(min(count, state.allowed, most))):
            slow = 20 if self._random.random() < 0.1 else 1
            self._groups[self._started] = PendingGroup(self._started, self._version, False)
            self._left[self._started] = slow * self._random.randint(1, 4)
            self._started += 1

    def _pass_time(self) -> None:
        """To the next moment at which something ends."""
        waits = [*self._left.values(), *([self._update_left] if self._training else [])]
        passed = min(waits)
        self._left = {position: left - passed for position, left in self._left.items()}
        self._update_left -= passed
        for position in [position for position, left in self._left.items() if not left]:
            del self._left[position]
            self._groups[position] = replace(self._groups[position], ended=True)
        if self._training and not self._update_left:
            self._version, self._training = self._version + 1, False


def is_batch(call: Call) -> bool:
    """It chose so many different groups as make a batch, all of which have ended."""
    assert not isinstance(call.answer, int) and call.answer is not None
    ended = {group.position for group in call.state.groups if group.ended}
    return len(call.answer) == call.state.batch_size == len(set(call.answer)) and set(call.answer) <= ended


def schedules(plugin: BatchPolicyCase) -> Iterator[Schedule]:
    """Schedules with all bounds and seeds."""
    for context, seed in product(BOUNDS, range(RUNS)):
        yield Schedule(plugin.make(context), context, seed)


def selections(plugin: BatchPolicyCase) -> Iterator[tuple[Schedule, Call]]:
    """All batches that it chose in all schedules."""
    for schedule in schedules(plugin):
        for call in schedule.play():
            if not isinstance(call.answer, int) and call.answer is not None:
                yield schedule, call


class BatchPolicyContract(PluginContract):
    """What every batch policy must do, in runs whose groups end in any order."""

    kind = "batch_policy"

    def test_admits_a_number_of_groups(self, plugin: BatchPolicyCase) -> None:
        """A whole number, not below 0; more than are allowed are not started."""
        for schedule in schedules(plugin):
            policy = schedule.policy
            for call in schedule.play():
                admitted = policy.admit(call.state)
                assert isinstance(admitted, int) and admitted >= 0, f"admit returned {admitted!r} for {call.state}"

    def test_batches_are_groups_that_have_ended(self, plugin: BatchPolicyCase) -> None:
        """As many different ones as a batch has."""
        for schedule, call in selections(plugin):
            assert is_batch(call), (
                f"{schedule.context}: expected {call.state.batch_size} different groups that have ended, chose "
                f"{call.answer!r} of {call.state.groups}"
            )

    def test_no_group_is_left_past_its_deadline(self, plugin: BatchPolicyCase) -> None:
        """A batch has no group that is too old, and leaves as many others for each deadline as later batches hold."""
        for schedule, call in selections(plugin):
            state, chosen = call.state, set(call.answer or ())  # type: ignore[arg-type]
            due = sorted(
                (group.version + state.max_staleness, group.position in chosen, group.position)
                for group in state.groups
            )
            late = [position for deadline, taken, position in due if taken and deadline < state.next_batch]
            assert not late, f"{schedule.context}: batch {state.next_batch} is too late for {late}, of {state.groups}"
            left = [(deadline, position) for deadline, taken, position in due if not taken]
            for number, (deadline, _) in enumerate(left, 1):
                room = (deadline - state.next_batch) * state.batch_size
                assert number <= room, (
                    f"{schedule.context}: after batch {state.next_batch} with {sorted(chosen)}, {number} groups are "
                    f"due by batch {deadline}, which is more than the {room} that fit: {state.groups}"
                )

    def test_a_run_never_stops(self, plugin: BatchPolicyCase) -> None:
        """If nothing runs and nothing may start, there is a batch; also the last ones, when nothing starts any more."""
        for schedule in schedules(plugin):
            schedule.play()

    def test_answers_depend_on_the_state_only(self, plugin: BatchPolicyCase) -> None:
        """Not on what was asked before, so that a resumed run goes on like one that was not interrupted."""
        for schedule in schedules(plugin):
            calls = schedule.play()
            for call in random.Random(schedule.seed).sample(calls, 5):
                new = plugin.make(schedule.context)
                ask = new.admit if isinstance(call.answer, int) else new.select
                again = ask(call.state)
                assert _plain(again) == _plain(call.answer), (
                    f"a new policy answers {again!r} where one with a history answered {call.answer!r}: {call.state}"
                )

    def test_answers_come_at_once(self, plugin: BatchPolicyCase) -> None:
        """Also with thousands of groups: the event loop waits, and with it all requests."""
        policy = plugin.make(MANY)
        groups = [PendingGroup(number, number % 3, number % 2 == 0) for number in range(9 * MANY.batch_size)]
        state = PipelineState(2, False, MANY.batch_size, MANY.max_staleness, MANY.pipeline_depth, groups)
        for ask in (policy.admit, policy.select):
            fastest = SECONDS
            for _ in range(3):
                begun = time.perf_counter()
                ask(state)
                fastest = min(fastest, time.perf_counter() - begun)
            if fastest >= SECONDS:
                pytest.fail(f"{ask.__name__} takes more than {SECONDS:g} s with {len(groups)} groups")


def _plain(answer: int | Sequence[int] | None) -> int | list[int] | None:
    return answer if answer is None or isinstance(answer, int) else sorted(answer)
