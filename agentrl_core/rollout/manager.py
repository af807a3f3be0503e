"""Sends prompts to the workers, and brings back trajectories with their rewards."""

import asyncio
import itertools
import logging
import textwrap
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from itertools import dropwhile
from typing import Any, TypeVar

from agentrl_core.api import (
    DeadlineError,
    RewardError,
    RewardResult,
    RewardTrajectory,
    RolloutError,
    Termination,
    WorkerError,
    together,
)
from agentrl_core.api.agent_loop import Status
from agentrl_core.config.schema import ResolvedConfig
from agentrl_core.controller.runtime import ActorDiedError, ActorHandle, ActorOptions, Runtime
from agentrl_core.data.rows import PromptBatch
from agentrl_core.hosting.rewards import RewardWorker
from agentrl_core.plugins.boundary import deadline, in_daemon_thread, traced
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.rollout.summaries import handed, whole
from agentrl_core.rollout.worker import AgentLoopWorker
from agentrl_core.runs.media import RowUploads
from agentrl_core.serving.clients import RoutedClient
from agentrl_core.serving.replicas import EngineReplicas, close_actors

logger = logging.getLogger(__name__)
SHOWN_CHARACTERS = 500
"""Of the error of a trajectory that is excluded; its record has all."""
RESTARTS = 3
"""New processes of one agent-loop worker or reward worker, in a run."""
FROZEN_GRACE = 60.0
"""Seconds that a worker may stand still beyond the time limit of what it does: ``rollout.trajectory_timeout`` of an
agent-loop worker, ``reward.timeout`` of a reward worker."""
T = TypeVar("T")


class AgentLoopManager:
    """Owns reward workers and agent-loop workers.

    Args:
        config: resolved.
        runtime: where they run.
        engines: that answer the trajectories' requests; the caller starts them.
        named: engines with frozen models, by name, for rewards, interactions and tools; closed with the workers.
        images: brings the images of rows to where all processes find them; None: the run shows none.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        runtime: Runtime,
        engines: EngineReplicas,
        named: Mapping[str, EngineReplicas] | None = None,
        images: RowUploads | None = None,
    ) -> None:
        self._images = images
        self._named = named or {}
        timeout, seed = config.rollout.turn_timeout, str(config.trainer.seed) if config.rollout.deterministic else None
        clients = {
            name: RoutedClient(name, config.engines[name], each.context, each.servers, timeout, seed)
            for name, each in self._named.items()
        }
        self._config = config
        self._runtime = runtime
        self._engines = engines
        # Each trajectory may come in a call of its own; in addition there must be room for pings and routes.
        most = config.rollout.agent.max_concurrent
        options = ActorOptions(restarts=RESTARTS, max_concurrency=max(1000, most + 100))
        self._rewarders: list[ActorHandle] = []
        self._workers: list[ActorHandle] = []
        runtime.started.callback(self.close)
        for index in range(config.reward.num_workers):
            rewarder = runtime.actor(
                RewardWorker, config.reward, config.loops_reward, clients, bool(config.environments),
                None if images is None else images.media, name=f"reward-{index}", options=options,
            )  # fmt: skip
            self._rewarders.append(rewarder)
        for index in range(config.agent_workers):
            worker = runtime.actor(
                AgentLoopWorker, config, self._engines.servers, self._rewarders, name=f"agent-loop-{index}",
                index=index, max_model_len=engines.context.max_model_len, vocab_size=engines.context.vocab_size,
                clients=clients, media=None if images is None else images.media, options=options,
            )  # fmt: skip
            self._workers.append(worker)
        self._engines.introduce(self._workers)
        for each in self._named.values():
            each.introduce([*self._workers, *self._rewarders])
        self._load = dict.fromkeys(self._workers, 0)
        self._slots = {worker: asyncio.Semaphore(most) for worker in self._workers}
        self._calls: dict[ActorHandle, dict[int, int]] = {worker: {} for worker in self._workers}
        self._next_rewarder = itertools.cycle(self._rewarders)
        self._started: set[ActorHandle] = set()
        self._watches = 0
        self._watchers: list[asyncio.Task[None]] = []
        self.on_progress: Callable[[int, int], None] = lambda done, total: None
        """Called every ``rollout.engine.health_interval`` with the trajectories that have ended, and with all, since
        none was under way."""
        self._total = self._done = 0
        self._ended: dict[ActorHandle, int] = {}

    def generate_sequences(
        self, prompts: PromptBatch, ended: Callable[[list[TrajectoryResult]], None] | None = None
    ) -> list[TrajectoryResult]:
        """Run every prompt row; results in the order of the rows, one for each agent of a trajectory.

        Args:
            ended: called in another thread with the trajectories of prompts all of whose samples have ended, while
                others run; never again before it returns.

        Raises:
            RolloutError: more than ``rollout.max_failed_fraction`` failed; holds the first root traceback.
        """
        work = self.sample(prompts) if ended is None else self._by_prompt(prompts, ended)
        results = self._runtime.run(self.watched(work))
        self.check_failed(results)
        report_failed(results)
        return results

    async def watched(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, with workers and engines watched and replaced meanwhile. Calls may overlap."""
        for engines in (self._engines, *self._named.values()):
            work = engines.watched(work)
        self._watches += 1
        if not self._watchers:
            limits = dict.fromkeys(self._workers, self._config.rollout.trajectory_timeout)
            limits |= dict.fromkeys(self._rewarders, self._config.reward.timeout)
            self._watchers = [
                asyncio.create_task(self._supervise(actor, limit + FROZEN_GRACE)) for actor, limit in limits.items()
            ]
        try:
            return await work
        finally:
            self._watches -= 1
            if not self._watches:
                watchers, self._watchers = self._watchers, []
                for watcher in watchers:
                    watcher.cancel()
                await asyncio.gather(*watchers, return_exceptions=True)

    async def _by_prompt(
        self, prompts: PromptBatch, ended: Callable[[list[TrajectoryResult]], None]
    ) -> list[TrajectoryResult]:
        """:meth:`sample`, while ``ended`` hears of those that have ended."""
        tasks = [asyncio.create_task(self.sample(group)) for group in prompts.pieces(len(prompts))]
        running = set(tasks)
        try:
            while running:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                results = [result for task in tasks if task in done for result in task.result()]
                if running:
                    await in_daemon_thread(ended, results)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return [result for task in tasks for result in task.result()]

    async def sample(self, prompts: PromptBatch) -> list[TrajectoryResult]:
        """:meth:`generate_sequences` for coroutines that are :meth:`watched`; failures are not counted. Calls may
        overlap."""
        if self._images is not None:
            prompts = await self._images.kept(prompts)
        config, workers = self._config, len(self._workers)
        # Samples of a prompt share what their worker knows of it, unless that would leave other workers without work.
        rows = max(len(prompts), config.data.batch_size * config.rollout.n)
        # Deterministic: the engine must know all sessions before the first one asks.
        pieces = prompts.chunk(workers) if config.rollout.deterministic else prompts.pieces(-(-rows // workers))
        # Not by the load: what calls at the same time have not begun counts too.
        if self._done >= self._total:
            self._total = self._done = 0
        self._total += len(prompts)
        parts = await together(self._run(piece) for piece in pieces)
        return [result for part in parts for result in part]

    def check_failed(self, results: Sequence[TrajectoryResult]) -> None:
        """Raise RolloutError where more than ``rollout.max_failed_fraction`` of the trajectories failed."""
        failed = [result for result in results if result.status is Status.FAILED]
        total = sum(not result.other_agent for result in results)
        if len(failed) > self._config.rollout.max_failed_fraction * total:
            raise RolloutError(
                f"{len(failed)} of {total} trajectories failed after {self._config.rollout.retries} retries, "
                f"more than rollout.max_failed_fraction={self._config.rollout.max_failed_fraction}. The first one, "
                f"{failed[0].trajectory_id}, with {failed[0].termination.value}:\n{failed[0].error}"
            )

    async def _run(self, piece: PromptBatch) -> list[TrajectoryResult]:
        """The results of the worker with the fewest rows; where it dies, those of the process that takes its place."""
        worker, retries = min(self._workers, key=self._load.__getitem__), self._config.rollout.retries
        self._load[worker] += len(piece)
        calls = self._calls[worker]
        try:
            async with self._slots[worker]:
                for restart in range(RESTARTS + 1):
                    calls[id(piece)] = len(piece)
                    try:
                        return await self._results(worker, replace(piece, attempt=restart * (retries + 1)))
                    except ActorDiedError as error:
                        # A deterministic engine waits for the requests of the lost trajectories.
                        if restart == RESTARTS or self._config.rollout.deterministic:
                            raise
                        # The first of the calls that were lost speaks for all.
                        if id(piece) in calls:
                            lost = sum(calls.values())
                            logger.error("%s\nRestarting %s with its %d trajectories", error, worker.name, lost)
                            calls.clear()
                    finally:
                        calls.pop(id(piece), None)
                raise AssertionError("the loop returns or raises")
        finally:
            self._load[worker] -= len(piece)
            self._done += len(piece)

    async def _results(self, worker: ActorHandle, rows: PromptBatch) -> list[TrajectoryResult]:
        """What a worker says of rows: in this process all of it, from another one summaries."""
        results: list[TrajectoryResult]
        if not self._runtime.is_remote:
            results = await worker.call("generate_sequences", rows)
            return results
        results, kept = await worker.call_keeping("generate_apart", rows)
        for place, result in enumerate(results):
            result.kept, result.place = kept, place
        return results

    async def _supervise(self, actor: ActorHandle, longest: float) -> None:
        """Restart a worker whose process or event loop has stood still for the ``longest`` time."""
        rollout = self._config.rollout
        while True:
            is_started = actor in self._started
            limit = longest if is_started else rollout.engine.start_timeout
            try:
                async with deadline(limit, f"{actor.name} has not moved for {limit:g} s"):
                    self._ended[actor] = await actor.call("ping") or 0
                self._started.add(actor)
                done = min(self._done + sum(self._ended.values()), self._total)
                # Not on the event loop: a tracker may be busy for long, with the step that has just ended.
                await in_daemon_thread(self.on_progress, done, self._total)
            except DeadlineError as error:
                logger.error("%s; killing its process", error)
                self._started.discard(actor)
                actor.restart()
            except WorkerError:
                # Its callers see this too.
                self._started.discard(actor)
            await asyncio.sleep(rollout.engine.health_interval)

    def score_groups(self, results: Sequence[TrajectoryResult]) -> None:
        """Let a reward manager with the capability ``group`` revise the rewards of each prompt's samples.

        A group that it cannot revise has failed with ``reward_error``.

        Raises:
            RolloutError: as :meth:`generate_sequences`, these failures included.
        """
        if self._scores_groups:
            self._runtime.run(self.score(results))
            self.check_failed(results)

    @property
    def _scores_groups(self) -> bool:
        return self._config.reward.manager.has("group")

    async def score(self, results: Sequence[TrajectoryResult]) -> None:
        """:meth:`score_groups` for coroutines; failures are not counted."""
        if not self._scores_groups:
            return
        # A frozen process cannot keep its own deadline.
        limit = self._config.reward.timeout + FROZEN_GRACE
        groups: dict[str, list[TrajectoryResult]] = defaultdict(list)
        for result in results:
            if result.reward is not None and result.reward_input is not None:
                groups[result.row["uid"]].append(result)

        async def asked(inputs: list[RewardTrajectory], rewards: list[RewardResult]) -> list[RewardResult]:
            """The answer of one reward worker; of another process where it dies."""
            for attempt in range(self._config.rollout.retries + 1):
                rewarder = next(self._next_rewarder)
                try:
                    async with deadline(limit, f"{rewarder.name} has not answered for {limit:g} s", WorkerError):
                        revised: list[RewardResult] = await rewarder.call("score_group", inputs, rewards)
                        return revised
                except ActorDiedError:
                    if attempt == self._config.rollout.retries:
                        raise
            raise AssertionError("the loop returns or raises")

        async def revise(group: list[TrajectoryResult]) -> None:
            try:
                # It may wait for another node.
                seen = await asyncio.to_thread(whole, handed(group))
                inputs = [replace(each.reward_input, token_rows=each.token_rows) for each in seen if each.reward_input]
                revised = await asked(inputs, [result.reward for result in group if result.reward is not None])
            except (RewardError, WorkerError) as error:
                logger.warning("the group of %s is excluded: %s", group[0].trajectory_id, error)
                for result in group:
                    result.reward, result.termination = None, Termination.REWARD_ERROR
                    result.error = traced(error)
                return
            for result, reward in zip(group, revised, strict=True):
                result.reward = reward

        await together(map(revise, groups.values()))

    def named_metrics(self) -> dict[str, float]:
        """Counters of the named engines since the last call, as ``engines/<name>/<counter>``."""
        return {
            f"engines/{name}/{key}": value
            for name, engines in self._named.items()
            for key, value in engines.metrics().items()
        }

    def image_metrics(self) -> dict[str, float]:
        """How images travelled since the last call: ``images/shown`` in requests, ``images/sent`` to engine servers for
        them, ``images/new`` files of the run, ``images/other_hosts`` reads by other hosts; the last three also in
        bytes."""
        if self._images is None:
            return {}
        media, workers = self._images.media, self._workers

        async def of(call: Awaitable[Mapping[str, float]]) -> Mapping[str, float]:
            try:
                return await call
            except WorkerError:
                # A process that died has counted for itself.
                return {}

        calls = [media.metrics(), *(worker.call("route", "", "image_metrics") for worker in workers)]
        counts: Counter[str] = Counter()
        for each in self._runtime.run(together(map(of, calls))):
            counts.update(each)
        return {f"images/{name}": value for name, value in counts.items()}

    def close(self) -> None:
        """Close all workers and the named engines."""
        actors = [*self._workers, *self._rewarders]
        self._workers, self._rewarders = [], []
        self._runtime.run(close_actors(actors))
        for engines in self._named.values():
            engines.close()


def report_failed(results: Sequence[TrajectoryResult]) -> None:
    """Log each cause of failures once: what fails often, such as a reward that is down, would fill the log."""
    causes: dict[tuple[Termination, str], list[TrajectoryResult]] = {}
    for result in (each for each in results if each.status is Status.FAILED):
        causes.setdefault((result.termination, without_frames(result.error)), []).append(result)
    for (termination, error), (first, *others) in causes.items():
        more = f" (and {len(others)} more)" if others else ""
        logger.warning(
            "trajectory %s is excluded after %d attempts%s: %s: %s",
            first.trajectory_id, first.attempts, more, termination.value, error,
        )  # fmt: skip


def without_frames(text: str | None) -> str:
    """What a traceback says after its frames, in one line; all of a text that is none."""
    lines = (text or "").strip().splitlines()
    if lines and lines[0].startswith("Traceback "):
        lines = list(dropwhile(lambda line: line.startswith(" "), lines[1:])) or lines[-1:]
    return textwrap.shorten(" ".join(lines), SHOWN_CHARACTERS, placeholder=" …")
