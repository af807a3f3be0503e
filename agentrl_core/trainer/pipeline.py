"""Sampling while the trainer trains (``rollout.max_staleness`` above 0).

Groups, the samples of one prompt each, start and end one by one on the runtime's event loop, which goes on while the
trainer computes. The batch policy says which start, and which make the next batch. The rest of a step is as always: the
trainer takes a batch here, and says when the engines have new weights.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import index
from typing import Any, TypeVar

from agentrl_core.api import (
    BatchPolicy,
    BatchPolicyContext,
    PendingGroup,
    PipelineState,
    RolloutError,
)
from agentrl_core.api.tree import Span
from agentrl_core.controller.runtime import Runtime
from agentrl_core.data.rows import PromptBatch
from agentrl_core.plugins.boundary import boundary, hang_reported, in_daemon_thread, with_traceback
from agentrl_core.rollout.manager import report_failed
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.trainer.algorithm import add_baselines
from agentrl_core.trainer.checkpoint import Position
from agentrl_core.trainer.dynamic_sampling import mark_replaced
from agentrl_core.trainer.idle import IdleTime, activities
from agentrl_core.trainer.rollouts import Rollouts, scores

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(eq=False)
class _Group:
    """The samples of one prompt; ``results`` once they have ended, which was at ``ended`` as Unix time. What models add
    to them was computed with the weights ``computed``."""

    position: int
    version: int
    prompts: PromptBatch
    results: list[TrajectoryResult] | None = None
    ended: float = 0.0
    activities: list[Span] = field(default_factory=list)
    computed: int | None = None


class Pipeline(Rollouts):
    """Samples ahead of the trainer, within the bound of ``rollout.max_staleness``.

    Args:
        runtime: whose event loop goes on between calls, see :meth:`Runtime.overlap`.
        step: finished steps.
        position: of the checkpoint that the run resumes from; None: it has trained the prompts of its steps.
    """

    def __init__(self, *args: Any, runtime: Runtime, step: int, position: Position | None) -> None:
        super().__init__(*args)
        config = self._config
        self._runtime = runtime
        self._size = config.data.batch_size
        self._context = BatchPolicyContext(self._size, config.rollout.max_staleness, config.pipeline_depth)
        self._policy: BatchPolicy = config.rollout.batch_policy.build(self._context)
        self._version = step
        self._training = False
        self._groups: dict[int, _Group] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._rows: deque[tuple[int, PromptBatch]] = deque()
        """The next prompts, by position."""
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._replaced: list[_Group] = []
        self._batch: list[_Group] = []
        self._ages: list[int] = []
        self._idle = IdleTime()
        self._worked: list[tuple[float, float]] = []
        position = position or Position(step * self._size)
        self._frontier = position.frontier
        self._beyond = set(position.beyond)
        self._rewards = {int(number): list(rewards) for number, rewards in position.rewards.items()}
        self._data.drawn.update({int(number): rows for number, rows in position.drawn.items()})
        self._next_drawn = self._frontier // self._size + 1

    # The trainer's thread ---------------------------------------------------------------------------------------

    def batch(self, step: int) -> list[TrajectoryResult]:
        """The trajectories of the next batch, by position and those of groups that were replaced since the last one."""
        begun = time.time()
        with self._timer.phase("rollout"):
            left = (self._steps - step + 1) * self._size - len(self._groups)
            self._draw(min(self._size * (self._context.pipeline_depth + 1), left))
            while (chosen := self._runtime.run(self._next_batch())) is None:
                self._draw(len(self._rows) + 1)
        self._batch = chosen
        ended = [(group.ended, group.activities) for group in chosen]
        self._idle.trainer_waited(begun, time.time(), ended, self._worked)
        self._worked = []
        results = _results(chosen)
        self._manager.check_failed(results)
        report_failed(results)
        return results

    def _draw(self, wanted: int) -> None:
        """Have so many prompts ready, whole steps of the sampler: samplers are called from the trainer's thread."""
        while len(self._rows) < wanted:
            drawn = self._next_drawn
            self._next_drawn += 1
            prompts = self._prompts(drawn, drawn)
            for position, group in enumerate(prompts.pieces(len(prompts)), (drawn - 1) * self._size):
                if position >= self._frontier and position not in self._beyond:
                    self._rows.append((position, group))

    def trained(self, step: int, results: Sequence[TrajectoryResult]) -> None:
        """Note what the batch has trained; the sampler learns of its steps in order, each when all of it is trained."""
        for group in self._batch:
            self._beyond.add(group.position)
            self._rewards[group.position] = scores(group.results or ())
        while self._frontier in self._beyond:
            self._beyond.remove(self._frontier)
            self._frontier += 1
            number, left = divmod(self._frontier, self._size)
            # A run that resumed with other data does not know all rows and rewards of the first steps.
            if not left and number in self._data.drawn:
                first = self._frontier - self._size
                rewards = [self._rewards.pop(position, []) for position in range(first, self._frontier)]
                self._data.update(number, rewards)

    def before_weights(self) -> None:
        """Deterministic: each batch is sampled with one version of the weights."""
        if self._config.rollout.deterministic:
            self._runtime.run(self._quiet())

    def weights_changed(self, version: int) -> None:
        """Let the groups start that may under the new weights."""
        self._runtime.run(self._new_version(version))

    def metrics(self, pause: float) -> dict[str, float]:
        """``staleness/``: how much older than the weights that they update the groups of the batch began; ``idle/``:
        seconds that the trainer waited for the batch, by cause, and in which no group was under way."""
        ages, idle = self._ages, self._runtime.run(self._idle_time(pause))
        return {"staleness/mean": sum(ages) / len(ages), "staleness/max": float(max(ages))} | idle

    def report(self) -> list[str]:
        """The idle time of the run by cause, and what would help most."""
        return self._idle.report(self._context.pipeline_depth, self._context.max_staleness)

    @property
    def position(self) -> Position:
        """See :attr:`Rollouts.position`."""
        drawn = {str(step): rows for step, rows in self._data.drawn.items() if step > self._frontier // self._size}
        rewards = {str(number): rewards for number, rewards in self._rewards.items()}
        return Position(self._frontier, sorted(self._beyond), drawn, rewards)

    def close(self) -> None:
        """Cancel what is under way: a run that is resumed samples it again."""
        self._runtime.run(self._stop())

    # The event loop ---------------------------------------------------------------------------------------------

    async def _next_batch(self) -> list[_Group] | None:
        """The groups of the next batch; None: prompts are needed first."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._manager.watched(_forever()), name="watch")
            self._watch.add_done_callback(self._note)
        while True:
            lacks_rows = self._admit()
            if self._error is not None:
                raise self._error
            state = self._state()
            chosen = self._asked("select", state, lambda found: None if found is None else [*map(index, found)])
            if chosen is not None:
                return self._take(state, chosen)
            if lacks_rows:
                return None
            if not self._running:
                raise RolloutError(
                    f"rollout.batch_policy '{self._policy_name}' starts nothing and chooses nothing, although "
                    f"{len(self._groups)} groups have ended and batch {state.next_batch + 1} waits for {self._size}"
                )
            self._changed.clear()
            if not await self._compute_ahead():
                await self._changed.wait()

    async def _compute_ahead(self) -> bool:
        """Let models compute what they add to groups that have ended, of which the next batch may consist; whether any
        were left. This is called while the trainer waits, so nothing updates the models meanwhile."""
        ended = (group for group in self._groups.values() if group.results is not None)
        first = sorted(ended, key=lambda group: (group.version, group.position))[: self._size]
        groups = [group for group in first if group.computed != self._version]
        if self._ahead is None or not groups:
            return False
        begun = time.time()
        for group in groups:
            group.computed = self._version
        await in_daemon_thread(self._ahead, _results(groups))
        self._worked.append((begun, time.time()))
        return True

    def _asked(self, method: str, state: PipelineState, as_expected: Callable[[Any], T]) -> T:
        """What the policy answers."""
        name = f"rollout.batch_policy '{self._policy_name}', {method}():"
        with boundary(RolloutError, name, describe=with_traceback), hang_reported(name):
            return as_expected(getattr(self._policy, method)(state))

    @property
    def _policy_name(self) -> str:
        return self._config.rollout.batch_policy.registered_name

    def _state(self) -> PipelineState:
        groups = [
            PendingGroup(group.position, group.version, group.results is not None)
            for _, group in sorted(self._groups.items())
        ]
        context = self._context
        return PipelineState(
            self._version, self._training, self._size, context.max_staleness, context.pipeline_depth, groups
        )

    def _admit(self) -> bool:
        """Start what may start; returns whether there were too few prompts for that."""
        if self._error is not None:
            return False
        state = self._state()
        left = (self._steps - state.next_batch) * self._size - len(self._groups)
        try:
            count = min(self._asked("admit", state, index), state.allowed, left)
        except RolloutError as error:
            # It may be the callback of a task, where nobody would see what it raises.
            self._error = error
            return False
        if self._config.rollout.deterministic:
            # One whole batch, and nothing beside it; less where that fills the last one.
            whole = min(self._size, left)
            count = 0 if self._running or count < whole else whole
        starting = min(count, len(self._rows)) if count > 0 else 0
        if self._config.rollout.deterministic and starting < count:
            return True
        groups = [_Group(position, self._version, prompts) for position, prompts in
                  (self._rows.popleft() for _ in range(starting))]  # fmt: skip
        self._groups |= {group.position: group for group in groups}
        for together in [groups] if self._config.rollout.deterministic and groups else [[group] for group in groups]:
            task = asyncio.create_task(self._run(together))
            self._running.add(task)
            task.add_done_callback(self._note)
        if self._watch is not None:
            self._idle.running(bool(self._running) or left <= 0, time.time())
        return starting < count

    def _note(self, task: "asyncio.Task[Any]") -> None:
        """A task has ended: let others begin, and the trainer look."""
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._error = self._error or task.exception()
        if task is not self._watch:
            self._admit()
        self._changed.set()

    async def _run(self, groups: list[_Group]) -> None:
        """Sample and score groups, and end each of them."""
        results: list[TrajectoryResult] = []
        # Seeds and names of trajectories follow from the step for which the sampler drew their prompt.
        for _, drawn in groupby(groups, key=lambda group: group.prompts.step):
            batches = [group.prompts for group in drawn]
            whole = replace(batches[0], rows=[row for batch in batches for row in batch.rows])
            sampled = await self._manager.sample(whole)
            await self._manager.score(sampled)
            if self._config.some_advantage_has("greedy_baseline"):
                add_baselines(sampled, await self._manager.sample(whole.greedy()))
            results += sampled
        by_prompt: dict[str, list[TrajectoryResult]] = {group.prompts.rows[0]["uid"]: [] for group in groups}
        for result in results:
            by_prompt[result.prompt].append(result)
        for group in groups:
            group.results, group.ended = by_prompt[group.prompts.rows[0]["uid"]], time.time()
            group.activities = activities(group.results)
            if self._config.rollout.resample_rounds and mark_replaced(group.results):
                self._replace(group)

    def _replace(self, group: _Group) -> None:
        """Leave a group without a signal out: the next prompt takes its place."""
        del self._groups[group.position]
        self._replaced.append(group)
        rounds, batches = self._config.rollout.resample_rounds, self._context.pipeline_depth + 1
        if len(self._replaced) > rounds * batches * self._size:
            self._manager.check_failed(_results(self._replaced))
            raise RolloutError(
                f"batch {self._version + self._training + 1}: {len(self._replaced)} prompts had samples with equal "
                f"rewards, more than rollout.resample_rounds={rounds} batches for each of the {batches} that may be "
                "under way. The task is too easy or too hard for the policy, or the reward is constant: raise "
                "rollout.resample_rounds or rollout.n, or set rollout.resample_rounds=0"
            )

    def _take(self, state: PipelineState, positions: Sequence[int]) -> list[_Group]:
        """Take the groups at these positions, and those that were replaced, out of what is pending."""
        chosen = [self._groups.get(position) for position in sorted(set(positions))]
        if len(positions) != self._size or len(chosen) != self._size or any(
            group is None or group.results is None for group in chosen
        ):  # fmt: skip
            raise RolloutError(
                f"rollout.batch_policy '{self._policy_name}' chose the positions {list(positions)!r:.200} for batch "
                f"{state.next_batch + 1}; expected {self._size} different ones of groups that have ended"
            )
        batch = [group for group in chosen if group is not None]
        old = min(batch, key=lambda group: group.version)
        if state.next_batch - old.version > state.max_staleness:
            raise RolloutError(
                f"rollout.batch_policy '{self._policy_name}' chose position {old.position}, begun with weights "
                f"{old.version}, for batch {state.next_batch + 1}, which updates weights {state.next_batch}: more than "
                f"rollout.max_staleness={state.max_staleness} versions"
            )
        self._ages = [state.next_batch - group.version for group in batch]
        for group in batch:
            del self._groups[group.position]
        replaced, self._replaced = self._replaced, []
        self._training = True
        self._admit()
        return sorted([*batch, *replaced], key=lambda group: group.position)

    async def _idle_time(self, pause: float) -> dict[str, float]:
        self._idle.paused(pause)
        return self._idle.take(time.time())

    async def _new_version(self, version: int) -> None:
        self._version, self._training = version, False
        self._admit()

    async def _quiet(self) -> None:
        while self._running:
            await asyncio.wait(self._running)

    async def _stop(self) -> None:
        tasks = [*self._running, *([self._watch] if self._watch is not None else [])]
        self._error = self._error or RolloutError("the run has ended")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _results(groups: Sequence[_Group]) -> list[TrajectoryResult]:
    return [result for group in groups for result in group.results or ()]


async def _forever() -> None:
    await asyncio.Event().wait()
