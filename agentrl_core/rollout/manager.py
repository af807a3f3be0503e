"""Sends prompts to the workers, and brings trajectories, rewards and new weights where they belong."""

import asyncio
import logging
import traceback
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from agentrl_core.api import (
    ConfigError,
    EngineContext,
    RewardError,
    RolloutError,
    Termination,
    WeightUpdate,
    WorkerError,
)
from agentrl_core.config.schema import Config
from agentrl_core.controller.runtime import ActorHandle, Runtime
from agentrl_core.plugins import resolve_ref
from agentrl_core.protocol import DataProto
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.rollout.rewards import RewardWorker
from agentrl_core.rollout.server import EngineServer
from agentrl_core.rollout.worker import AgentLoopWorker

logger = logging.getLogger(__name__)
CLOSE_TIMEOUT = 30.0
"""Seconds that an actor may take to close before it is killed."""


class AgentLoopManager:
    """Owns engine servers, reward workers and agent-loop workers.

    Args:
        config: resolved.
        runtime: where they run.
        engine: place of replica 0; ``shared_module`` set only if the engine may use the actor's module.
        engine_gpus: GPUs, or the part of one, for each replica.
    """

    def __init__(self, config: Config, runtime: Runtime, engine: EngineContext, engine_gpus: float = 0.0) -> None:
        rollout, ref = config.rollout, config.rollout.engine.ref
        if ref is None:
            raise ConfigError("rollout.engine has not been resolved; load the configuration with load_config")
        self._config = config
        self._runtime = runtime
        self.capabilities = resolve_ref(ref).spec.capabilities
        self.shares_module = engine.shared_module is not None
        self._servers: list[ActorHandle] = [
            runtime.actor(
                EngineServer, ref, rollout.engine.config, replace(engine, replica=replica),
                name=f"engine-{replica}", num_gpus=engine_gpus, python=rollout.engine.python,
            )
            for replica in range(rollout.engine.replicas)
        ]  # fmt: skip
        self._rewarders = [
            runtime.actor(RewardWorker, config.reward, name=f"reward-{index}")
            for index in range(config.reward.num_workers)
        ]
        self._workers = [
            runtime.actor(
                AgentLoopWorker, config, self._servers, self._rewarders, name=f"agent-loop-{index}",
                index=index, max_model_len=engine.max_model_len, vocab_size=engine.vocab_size,
                engine_sessions="sessions" in self.capabilities,
            )
            for index in range(rollout.agent.num_workers)
        ]  # fmt: skip

    def start(self) -> None:
        """Start the engines.

        Raises:
            EngineError: one of them did not start.
        """
        self._runtime.run(self._all(self._servers, "start"))

    async def _all(self, actors: Sequence[ActorHandle], method: str, *args: Any) -> list[Any]:
        return list(await asyncio.gather(*(actor.call(method, *args) for actor in actors)))

    def generate_sequences(self, prompts: DataProto) -> list[TrajectoryResult]:
        """Run every prompt row; results in the order of the rows. ``meta_info``: see ``AgentLoopWorker``.

        Raises:
            RolloutError: more than ``rollout.max_failed_fraction`` failed; holds the first root traceback.
        """
        results: list[TrajectoryResult] = self._runtime.run(self._generate(prompts))
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

    async def _generate(self, prompts: DataProto) -> list[TrajectoryResult]:
        chunks = [chunk for chunk in prompts.chunk(len(self._workers)) if len(chunk)]
        calls = (worker.call("generate_sequences", chunk) for worker, chunk in zip(self._workers, chunks, strict=False))
        return [result for part in await asyncio.gather(*calls) for result in part]

    def score_groups(self, results: Sequence[TrajectoryResult]) -> None:
        """Let a reward manager with the capability ``group`` revise the rewards of each prompt's samples.

        A group that it cannot revise has failed with ``reward_error``.

        Raises:
            RolloutError: as :meth:`generate_sequences`, these failures included.
        """
        ref = self._config.reward.manager.ref
        if ref is not None and "group" in resolve_ref(ref).spec.capabilities:
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

    def update_weights(self, update: WeightUpdate, version: int) -> None:
        """Give every replica the new weights."""
        self._runtime.run(self._all(self._servers, "update_weights", update, version))

    def engine_metrics(self) -> dict[str, float]:
        """Counters of all replicas, added up."""
        totals: dict[str, float] = defaultdict(float)
        for metrics in self._runtime.run(self._all(self._servers, "metrics")):
            for name, value in metrics.items():
                totals[name] += value
        return dict(totals)

    def close(self) -> None:
        """Close everything; a failure to close one does not keep the others open."""
        for actors in (self._workers, self._rewarders, self._servers):
            for actor in actors:
                try:
                    self._runtime.run(asyncio.wait_for(actor.call("close"), CLOSE_TIMEOUT))
                except Exception:  # noqa: BLE001 - the run is over, and its own error matters more
                    logger.warning("closing an actor failed", exc_info=True)
                actor.kill()


def last_line(text: str | None) -> str:
    """The last line of a traceback: the exception itself."""
    return (text or "").strip().rpartition("\n")[2]
