"""Runs trajectories: one coroutine each, loops and tools built once, failures classified, rewards at once."""

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from functools import cache
from typing import Any

from agentrl_core.api import (
    AgentLoopBase,
    AgentLoopContext,
    ConfigError,
    DeadlineError,
    EngineError,
    EpisodeError,
    PluginError,
    RewardError,
    RewardResult,
    Termination,
    ToolParserContext,
    WorkerError,
    together,
)
from agentrl_core.api.agent_loop import Status
from agentrl_core.api.tree import Node
from agentrl_core.config.schema import ResolvedConfig
from agentrl_core.controller.runtime import ActorHandle
from agentrl_core.data.chat_template import build_renderer, reserved_of
from agentrl_core.data.row_sampling import with_row_sampling
from agentrl_core.data.rows import PromptBatch
from agentrl_core.hosting.environments import HostedEnvironment
from agentrl_core.hosting.rewards import check_score
from agentrl_core.hosting.tools import HostedTool
from agentrl_core.plugins.boundary import deadline, traced
from agentrl_core.rollout.identity import TrajectoryKey
from agentrl_core.rollout.loop_output import adopt
from agentrl_core.rollout.pacing import fewer_collections
from agentrl_core.rollout.results import TrajectoryResult, by_agent, reward_trajectory
from agentrl_core.rollout.session import HostedInteraction, RolloutSession, SessionEnvironment, interaction_context
from agentrl_core.rollout.summaries import summaries
from agentrl_core.rollout.trajectory import TemplateBreakError, TrajectoryLimits
from agentrl_core.rollout.watchdog import Watchdog
from agentrl_core.runs.media import RunImages
from agentrl_core.serving.clients import RoutedClient
from agentrl_core.serving.router import AsyncLLMServerManager

logger = logging.getLogger(__name__)
WATCHDOG_SECONDS = 60.0
"""Interval between reports of slow trajectories, and the age from which one is slow."""

CLOSE_SECONDS = 20.0
"""For an agent loop, a tool or an environment to close; less than their worker has."""

FATAL = (ConfigError, PluginError, TemplateBreakError)
"""What is wrong with these is wrong for every trajectory: the run stops."""


class AgentLoopWorker:
    """Builds everything once and runs one coroutine per trajectory.

    Args:
        config: resolved.
        servers: engine servers.
        rewarders: reward workers.
        index: number of this worker.
        max_model_len: tokens of prompt and response together.
        vocab_size: of the model's embedding.
        clients: of the named engines.
        media: the images of the run; None: it shows none.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        servers: Sequence[ActorHandle],
        rewarders: Sequence[ActorHandle],
        *,
        index: int,
        max_model_len: int,
        vocab_size: int,
        clients: Mapping[str, RoutedClient],
        media: RunImages | None = None,
    ) -> None:
        self._clients = clients
        self._vocab_size = vocab_size
        rollout = config.rollout
        self._config = config
        self._rewarders = rewarders
        self._next_rewarder = index
        self._live: dict[str, RolloutSession] = {}
        self._watchdog = Watchdog(self._live, WATCHDOG_SECONDS)
        self._gate = asyncio.Semaphore(rollout.agent.max_concurrent)
        self._ended: set[str] = set()
        """Of the calls under way."""
        self._engines = AsyncLLMServerManager(
            servers,
            turn_timeout=rollout.turn_timeout,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            capabilities=rollout.engine.plugin.spec.capabilities,
            max_images=config.model.images.max_count if media is not None else 0,
            media=media,
            restarts=rollout.engine.restarts > 0,
            retry=rollout.engine.retry,
            seed=f"{config.trainer.seed}/{index}",
        )
        seed = config.trainer.seed
        tools = [HostedTool(slot, seed, clients, shows_images=media is not None) for slot in config.tools]
        clients_bring_tools = any(slot.has("chat_endpoint") for slot in rollout.agent.loops)
        needs_parser = config.tools or config.environments or clients_bring_tools
        parser = rollout.tool_parser.build(ToolParserContext()) if needs_parser else None
        renderer = build_renderer(rollout.renderer, config.model, parser)
        self._environment = SessionEnvironment(
            renderer=renderer,
            limits=TrajectoryLimits(
                rollout.max_response_length,
                max_model_len,
                rollout.template_break,
                max_images=config.model.images.max_count,
                reserved=reserved_of(renderer),
            ),
            servers=self._engines,
            tools={tool.name: tool for tool in tools},
            interactions={
                slot.registered_name: HostedInteraction(
                    slot.build(interaction_context(slot, seed, clients)), slot.timeout
                )
                for slot in config.interactions
            },
            environments={
                slot.registered_name: HostedEnvironment(slot, seed, clients, media is not None)
                for slot in config.environments
            },
            deterministic=rollout.deterministic,
            adapters=cache(lambda agent: config.adapter_of(self._policy_of(agent))),
            keeps_version=rollout.on_new_weights == "finish",
            media=media,
            images=config.model.images,
        )
        context = AgentLoopContext(
            renderer=renderer.chat,
            tool_parser=parser,
            tools=tuple(name for tool in tools for name in tool.schemas),
            interactions=tuple(self._environment.interactions),
            max_response_length=rollout.max_response_length,
            engine_capabilities=rollout.engine.plugin.spec.capabilities,
        )
        self._loops: dict[str, AgentLoopBase] = {
            slot.registered_name: slot.build(context) for slot in rollout.agent.loops
        }
        self._default_loop = next(iter(self._loops))
        self._trained = frozenset(config.trained)

    async def generate_sequences(self, prompts: PromptBatch) -> list[TrajectoryResult]:
        """Run every row of ``prompts``; the results are in its order, one for each agent of a trajectory.

        Calls may overlap; together they have ``rollout.agent.max_concurrent`` trajectories at once.

        Raises:
            ConfigError, PluginError, TemplateBreakError: nothing could succeed.
        """
        rows = prompts.rows
        keys = [
            TrajectoryKey(
                self._config.trainer.seed,
                prompts.split,
                prompts.step,
                row["prompt_index"],
                row["sample_index"],
                prompts.attempt,
            )  # fmt: skip
            for row in rows
        ]
        # Deterministic: wave by wave, because no step is made while an open session waits for its turn at the gate.
        most = self._config.rollout.agent.max_concurrent
        size = most if self._config.rollout.deterministic else max(len(rows), 1)
        results: list[TrajectoryResult] = []
        with fewer_collections(), self._watchdog:
            try:
                for start in range(0, len(rows), size):
                    wave = slice(start, start + size)
                    results += await self._wave(keys[wave], rows[wave], prompts.sampling)
            finally:
                self._ended -= {key.trajectory_id for key in keys}
        return results

    async def generate_apart(self, prompts: PromptBatch) -> tuple[list[TrajectoryResult], list[TrajectoryResult]]:
        """Summaries, and the results of :meth:`generate_sequences`."""
        results = await self.generate_sequences(prompts)
        return summaries(results), results

    async def route(self, engine: str, method: str, *args: Any) -> Any:
        """Call a method of the router of a named engine; an empty name stands for the policy's engine."""
        return getattr(self._clients[engine].router if engine else self._engines, method)(*args)

    async def _wave(
        self,
        keys: Sequence[TrajectoryKey],
        rows: Sequence[dict[str, Any]],
        sampling: Mapping[str, Any],
    ) -> list[TrajectoryResult]:
        sessions = [RolloutSession(key, row, self._environment) for key, row in zip(keys, rows, strict=True)]
        try:
            if self._config.rollout.deterministic:
                # The engine waits for all open sessions; it must know them all before the first one asks.
                for session in sessions:
                    await session.open_engine()
            parts = await together(
                self._run(key, row, session, sampling) for key, row, session in zip(keys, rows, sessions, strict=True)
            )
        except BaseException:
            # Those that never began have not closed their own.
            for session in sessions:
                await uninterrupted(session.close())
            raise
        return [result for part in parts for result in part]

    async def _run(
        self,
        key: TrajectoryKey,
        row: dict[str, Any],
        session: RolloutSession,
        sampling: Mapping[str, Any],
    ) -> list[TrajectoryResult]:
        """One trajectory; a failure of the infrastructure starts it again from a fresh state."""
        async with self._gate:
            await self._environment.pacer.wait()
            result = await self._attempt(key, session, sampling)
            # What was sampled and only could not be scored has been scored again already.
            while (
                result.status is Status.FAILED
                and result.reward_input is None
                and result.attempts <= self._config.rollout.retries
            ):
                key = key.next_attempt()
                attempts = result.attempts
                result = await self._attempt(key, RolloutSession(key, row, self._environment), sampling)
                result.attempts += attempts
            self._ended.add(key.trajectory_id)
            result.pack()
            if result.status is Status.FAILED or not result.agents:
                return [result]
            result.agents[0].attempts = result.attempts
            return result.agents

    async def _attempt(
        self, key: TrajectoryKey, session: RolloutSession, sampling: Mapping[str, Any]
    ) -> TrajectoryResult:
        result = session.report
        self._live[key.request_id] = session
        start = time.perf_counter()
        limit = self._config.rollout.trajectory_timeout
        try:
            late = lambda: f"rollout.trajectory_timeout of {limit:g} s passed while {session.state}"  # noqa: E731
            async with deadline(limit, late, paused=self._engines.outage):
                await self._trajectory(session, sampling)
        except FATAL:
            raise
        except Exception as error:  # noqa: BLE001 - a failed trajectory is data, not a crash
            result.error = str(error) if isinstance(error, DeadlineError) else traced(error)
            result.termination = classify(error)
        finally:
            try:
                await uninterrupted(session.close())
            finally:
                del self._live[key.request_id]
        result.timings["total"] = time.perf_counter() - start
        tree = result.tree
        if tree.nodes:
            result.metrics["template_breaks"] = float(tree.template_breaks)
            result.metrics["template_mismatches"] = float(tree.template_mismatches)
            result.metrics["parse_errors"] = float(tree.parse_errors)
            # An agent behind the endpoint runs its own tools; a loop may call tools that the policy did not ask for.
            result.metrics["tool_calls"] = max(result.metrics.get("tool_calls", 0.0), float(tree.tool_calls))
        return result

    async def _trajectory(self, session: RolloutSession, sampling: Mapping[str, Any]) -> None:
        """Run the loop and score what it returns."""
        result = session.report
        await session.open_engine()
        await session.open_environment()
        name = session.row.get("agent_name") or self._default_loop
        if name not in self._loops:
            raise ConfigError(f"agent_name is {name!r}; rollout.agent.loops lists {', '.join(self._loops)}")
        sampling = with_row_sampling(sampling, session.row.get("extra_info") or {}, greedy=session.greedy)
        returned = await self._loops[name].run(sampling, session=session, **session.row)
        limits = self._environment.limits
        sampled = {node: node.agent for node in result.tree.turns()} if self._config.policies else {}
        rows = adopt(name, result.tree, returned, self._vocab_size, limits.max_model_len, limits.reserved)
        result.outputs, result.termination, result.error = rows, rows[-1].termination, rows[-1].error
        if result.termination.status is not Status.TRAINED:
            result.error = result.error or f"the agent loop {name!r} ended with {result.termination.value}"
            return
        await session.collect_rewards()
        parts = by_agent(result)
        for part in parts:
            self._find_policy(name, part, sampled)
            await self._score_agent(name, session, part)
        result.agents = [] if parts[0] is result else parts

    def _policy_of(self, agent: str) -> str:
        """The policy that plays an agent.

        Raises:
            ConfigError: none does.
        """
        policy = self._config.policy_of(agent)
        if policy is None:
            raise ConfigError(
                f"policies: none plays the agent {agent!r}, which has a turn; add its name to policies.NAME.agents of "
                f"{' or '.join(self._config.policies)}"
            )
        return policy

    def _find_policy(self, loop: str, part: TrajectoryResult, sampled: Mapping[Node, str]) -> None:
        """Note which of several policies played an agent; rows of one that is not trained are not trained.

        Args:
            sampled: by turn, the agent that it was sampled for.

        Raises:
            ConfigError: another one sampled a turn of it.
        """
        if not self._config.policies:
            return
        part.policy = self._policy_of(part.agent or "")
        for output in part.outputs:
            output.trained = output.trained and part.policy in self._trained
            for node in output.tokens.response:
                if node in sampled and self._policy_of(sampled[node]) != part.policy:
                    raise ConfigError(
                        f"rollout.agent.loops: {loop!r} returns a row of the agent {part.agent!r} with a turn that was "
                        f"sampled for {sampled[node]!r}, by another policy: set session.agent before the turn is "
                        "generated"
                    )

    async def _score_agent(self, loop: str, session: RolloutSession, part: TrajectoryResult) -> None:
        """Give one agent's part of the trajectory, or the whole one, its reward."""
        for output in part.outputs:
            output.trajectory_id = part.trajectory_id
        if part.sampled_tokens:
            own = part.outputs[-1].reward_score
            part.reward = None if own is None else check_score(f"agent loop {loop!r}", own)
            # On the whole one too: it says that what fails now is not to be sampled again.
            seen = await session.score_episode(reward_trajectory(part), part)
            part.reward_input = session.report.reward_input = seen
            if part.reward is None:
                with session.timed("reward", "being scored"):
                    part.reward = await self._score(part, session.report)

    async def _score(self, part: TrajectoryResult, whole: TrajectoryResult) -> RewardResult:
        """The reward, of another worker if one fails: sampling again would give the same trajectory."""
        while True:
            self._next_rewarder += 1
            rewarder = self._rewarders[self._next_rewarder % len(self._rewarders)]
            try:
                reward: RewardResult = await rewarder.call("score", part.reward_input)
                check_places(reward, part)
                return reward
            except (RewardError, WorkerError) as error:
                if whole.attempts > self._config.rollout.retries:
                    raise RewardError(str(error)) from error
                whole.attempts += 1

    async def ping(self) -> int:
        """Answer, if this process and its event loop move: with the number of ended trajectories that the calls under
        way have not brought back."""
        return len(self._ended)

    async def close(self) -> None:
        """End all child processes, and what the loops keep running. What does not close in time is logged by name."""
        open_ones: dict[str, Any] = {f"agent loop {name!r}": loop for name, loop in self._loops.items()}
        open_ones |= {f"tool {name!r}": tool for name, tool in self._environment.tools.items()}
        open_ones |= {environment.title: environment for environment in self._environment.environments.values()}

        async def close(what: str, opened: Any) -> None:
            try:
                async with deadline(CLOSE_SECONDS, f"no answer within {CLOSE_SECONDS:g} s"):
                    await opened.close()
            except Exception:  # noqa: BLE001 - the run is over, and the others must be closed too
                logger.warning("closing %s failed", what, exc_info=True)

        await asyncio.gather(*(close(what, opened) for what, opened in open_ones.items()))


async def uninterrupted(cleanup: Coroutine[Any, Any, None]) -> None:
    """Run a clean-up to its end even if the caller is cancelled meanwhile, several times even, and raise that then."""
    task, cancelled = asyncio.ensure_future(cleanup), None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()


def check_places(reward: RewardResult, part: TrajectoryResult) -> None:
    """Refuse rewards of turns or tokens that the trajectory does not have.

    Raises:
        RewardError: with both numbers.
    """
    if reward.turn_rewards and len(reward.turn_rewards) > (turns := len(part.turns)):
        raise RewardError(f"{len(reward.turn_rewards)} turn_rewards for a trajectory of {turns} turns")
    if reward.token_rewards and len(reward.token_rewards) != (tokens := part.sampled_tokens):
        raise RewardError(f"{len(reward.token_rewards)} token_rewards for a trajectory of {tokens} sampled tokens")


def classify(error: Exception) -> Termination:
    """At which boundary a trajectory failed."""
    if isinstance(error, RewardError):
        return Termination.REWARD_ERROR
    if isinstance(error, EpisodeError):
        return Termination.EPISODE_ERROR
    if isinstance(error, (EngineError, WorkerError)):
        return Termination.ENGINE_ERROR
    if isinstance(error, (DeadlineError, TimeoutError)):
        return Termination.TIMEOUT
    return Termination.ABORTED
