"""Sends prompts to the workers, and brings trajectories, rewards and new weights where they belong."""

import asyncio
import logging
import traceback
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from agentrl_core.api import (
    DeadlineError,
    EngineContext,
    RewardError,
    RolloutError,
    SamplingParams,
    Termination,
    TokenOutput,
    WeightUpdate,
    WorkerError,
)
from agentrl_core.config.schema import ResolvedConfig
from agentrl_core.controller.runtime import ActorDiedError, ActorHandle, Runtime
from agentrl_core.data.rows import PromptBatch
from agentrl_core.hosting.rewards import RewardWorker
from agentrl_core.plugins.boundary import deadline
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.rollout.worker import AgentLoopWorker
from agentrl_core.serving.placement import Seats, seats_anywhere
from agentrl_core.serving.replicas import EngineFleet
from agentrl_core.serving.weight_delivery import WeightSender

logger = logging.getLogger(__name__)
RESTARTS = 3
"""New processes of one agent-loop worker or reward worker, in a run."""
FROZEN_GRACE = 60.0
"""Seconds that a worker may stand still beyond ``rollout.trajectory_timeout``."""
CLOSE_TIMEOUT = 30.0
"""Seconds that an actor may take to close before it is killed."""


class AgentLoopManager:
    """Owns engine servers, reward workers and agent-loop workers.

    Args:
        config: resolved.
        runtime: where they run.
        engine: context of replica 0; ``shared_module`` set only if the engine may use the actor's module.
        seats: of the engine replicas; default: anywhere, on the CPU.
    """

    def __init__(
        self, config: ResolvedConfig, runtime: Runtime, engine: EngineContext, seats: Seats | None = None
    ) -> None:
        rollout = config.rollout
        self._config = config
        self._runtime = runtime
        self.capabilities = rollout.engine.plugin.spec.capabilities
        self.shares_module = engine.shared_module is not None
        agent = rollout.agent
        seats = seats_anywhere(config) if seats is None else seats
        self._replicas = len(seats)
        self._fleet = EngineFleet(
            runtime, rollout.engine, engine, seats, most_requests=agent.num_workers * agent.max_concurrent
        )
        self._rewarders = [
            runtime.actor(RewardWorker, config.reward, name=f"reward-{index}", restarts=RESTARTS)
            for index in range(config.reward.num_workers)
        ]
        self._workers = [
            runtime.actor(
                AgentLoopWorker, config, self._fleet.servers, self._rewarders, name=f"agent-loop-{index}",
                index=index, max_model_len=engine.max_model_len, vocab_size=engine.vocab_size,
                engine_sessions="sessions" in self.capabilities, restarts=RESTARTS,
            )
            for index in range(rollout.agent.num_workers)
        ]  # fmt: skip
        self._fleet.introduce(self._workers)
        self._started: set[ActorHandle] = set()

    def start(self) -> None:
        """Start the engines.

        Raises:
            EngineError: one of them did not start.
        """
        self._runtime.run(self._fleet.start())

    def generate_sequences(self, prompts: PromptBatch) -> list[TrajectoryResult]:
        """Run every prompt row; results in the order of the rows.

        Raises:
            RolloutError: more than ``rollout.max_failed_fraction`` failed; holds the first root traceback.
        """
        results: list[TrajectoryResult] = self._runtime.run(self._fleet.watched(self._generate(prompts)))
        self._check_failed(results)
        for result in results:
            if result.failed:
                logger.warning(
                    "trajectory %s is excluded after %d attempts: %s: %s",
                    result.trajectory_id, result.attempts, result.termination.value, last_line(result.error),
                )  # fmt: skip
        return results

    def _check_failed(self, results: Sequence[TrajectoryResult]) -> None:
        failed = [result for result in results if result.failed]
        if len(failed) > self._config.rollout.max_failed_fraction * len(results):
            raise RolloutError(
                f"{len(failed)} of {len(results)} trajectories failed after {self._config.rollout.retries} retries, "
                f"more than rollout.max_failed_fraction={self._config.rollout.max_failed_fraction}. The first one, "
                f"{failed[0].trajectory_id}, with {failed[0].termination.value}:\n{failed[0].error}"
            )

    async def _generate(self, prompts: PromptBatch) -> list[TrajectoryResult]:
        chunks = prompts.chunk(len(self._workers))
        calls = (self._run(worker, chunk) for worker, chunk in zip(self._workers, chunks, strict=False))
        watchers = [asyncio.create_task(self._supervise(actor)) for actor in (*self._workers, *self._rewarders)]
        try:
            return [result for part in await asyncio.gather(*calls) for result in part]
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)

    async def _run(self, worker: ActorHandle, chunk: PromptBatch) -> list[TrajectoryResult]:
        """The results of one worker; where it dies, those of the process that takes its place."""
        for restart in range(RESTARTS + 1):
            attempt = restart * (self._config.rollout.retries + 1)
            try:
                results: list[TrajectoryResult] = await worker.call(
                    "generate_sequences", replace(chunk, attempt=attempt)
                )
                return results
            except ActorDiedError as error:
                # A deterministic engine waits for the requests of the lost trajectories.
                if restart == RESTARTS or self._config.rollout.deterministic:
                    raise
                logger.error("%s\nRestarting %s with its %d trajectories", error, worker.name, len(chunk))
        raise AssertionError("the loop returns or raises")

    async def _supervise(self, actor: ActorHandle) -> None:
        """Restart a worker whose process or event loop has stood still for longer than a trajectory may take."""
        rollout = self._config.rollout
        while True:
            is_started = actor in self._started
            limit = rollout.trajectory_timeout + FROZEN_GRACE if is_started else rollout.engine.start_timeout
            try:
                async with deadline(limit, f"{actor.name} has not moved for {limit:g} s"):
                    await actor.call("ping")
                self._started.add(actor)
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
        if self._config.reward.manager.has("group"):
            self._runtime.run(self._score_groups(results))
            self._check_failed(results)

    async def _score_groups(self, results: Sequence[TrajectoryResult]) -> None:
        groups: dict[str, list[TrajectoryResult]] = defaultdict(list)
        for result in results:
            if result.reward is not None and result.reward_input is not None:
                groups[result.row["uid"]].append(result)

        async def revise(index: int, group: list[TrajectoryResult]) -> None:
            rewarder = self._rewarders[index % len(self._rewarders)]
            inputs = [result.reward_input for result in group]
            try:
                revised = await rewarder.call("score_group", inputs, [result.reward for result in group])
            except (RewardError, WorkerError) as error:
                logger.warning("the group of %s is excluded: %s", group[0].trajectory_id, error)
                for result in group:
                    result.reward, result.termination = None, Termination.REWARD_ERROR
                    result.error = "".join(traceback.format_exception(error))
                return
            for result, reward in zip(group, revised, strict=True):
                result.reward = reward

        await asyncio.gather(*(revise(index, group) for index, group in enumerate(groups.values())))

    def sleep(self) -> None:
        """Let the engines release what ``rollout.engine.sleep`` says; :meth:`update_weights` wakes them."""
        self._runtime.run(self._fleet.sleep())

    def can_all_read(self, files: Sequence[str]) -> bool:
        """Whether every living replica is where these files are."""
        return self._runtime.run(self._fleet.can_all_read(files))

    def update_weights(self, update: WeightUpdate, version: int, elsewhere: WeightUpdate | None = None) -> None:
        """Give every replica the new weights; ``elsewhere`` is for those that cannot read the files of ``update``.

        Raises:
            EngineError: a replica refuses them, naming what does not fit, or none is alive.
        """
        self._runtime.run(self._fleet.update_weights(update, version, elsewhere))

    def broadcast_weights(self, sender: WeightSender, version: int) -> None:
        """Give every replica the actor's weights from device to device.

        Raises:
            EngineError: a replica refuses them, naming what does not fit, or none is alive.
            WorkerError: the actor or a replica died in the middle of it.
        """
        self._runtime.run(self._fleet.broadcast_weights(sender, version))

    def probe(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[TokenOutput]:
        """What each replica answers to one request, in their order; no trajectory, tool or reward takes part."""
        session = "sessions" in self.capabilities
        request = "probe"

        async def ask() -> list[TokenOutput]:
            replicas = range(self._replicas)
            calls = (self._fleet.sample(each, prompt_ids, params, request, session=session) for each in replicas)
            return list(await asyncio.gather(*calls))

        return self._runtime.run(ask())

    def answer(self, prompts: Sequence[Sequence[int]], params: SamplingParams, concurrency: int) -> list[TokenOutput]:
        """One answer to each prompt, of the replicas in turns, so many requests at a time; request i has seed i."""
        session = "sessions" in self.capabilities
        slots = asyncio.Semaphore(concurrency)

        async def one(number: int, prompt: Sequence[int]) -> TokenOutput:
            seeded = replace(params, seed=number)
            async with slots:
                replica = number % self._replicas
                return await self._fleet.sample(replica, prompt, seeded, f"answer-{number}", session=session)

        async def all_of_them() -> list[TokenOutput]:
            return list(await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts))))

        return self._runtime.run(all_of_them())

    def engine_memory(self) -> int | None:
        """Bytes of host memory that all replicas hold, with the processes that they started; None if unknown."""
        return self._runtime.run(self._fleet.memory())

    def engine_metrics(self) -> dict[str, float]:
        """Counters of all replicas: see :meth:`EngineFleet.metrics`."""
        return self._runtime.run(self._fleet.metrics())

    def close(self) -> None:
        """Close everything; a failure to close one does not keep the others open."""
        for actors in (self._workers, self._rewarders, self._fleet.servers):
            for actor in actors:
                try:
                    self._runtime.run(asyncio.wait_for(actor.call("close"), CLOSE_TIMEOUT))
                except Exception:  # noqa: BLE001 - the run is over, and its own error matters more
                    logger.warning("closing an actor failed", exc_info=True)
                actor.kill()


def last_line(text: str | None) -> str:
    """The last line of a traceback: the exception itself."""
    return (text or "").strip().rpartition("\n")[2]
