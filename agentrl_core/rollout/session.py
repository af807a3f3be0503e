"""One trajectory's handle on the world: its tools, interaction and engine session, opened once, always released."""

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from agentrl_core.api import (
    ConfigError,
    EngineClient,
    EngineError,
    Engines,
    EpisodeError,
    Interaction,
    InteractionContext,
    InteractionError,
    InteractionTurn,
    Message,
    MultiModal,
    Renderer,
    RewardError,
    RewardTrajectory,
    SamplingParams,
    Termination,
    TokenOutput,
    ToolCall,
    ToolError,
    ToolOutcome,
    ToolResponse,
    ToolResult,
    ToolUnavailableError,
    TrajectorySession,
)
from agentrl_core.api.message_parts import image_part, text_of
from agentrl_core.api.tree import Call, Earned, Request, Source, Span
from agentrl_core.config.schema import ImagesConfig, InteractionSlot
from agentrl_core.engine_kit.media import parts_of
from agentrl_core.hosting.environments import HostedEnvironment, HostedEpisode
from agentrl_core.hosting.tools import HostedTool, check_result, is_finite, select_tools
from agentrl_core.plugins.boundary import boundary, within
from agentrl_core.rollout.identity import TrajectoryKey
from agentrl_core.rollout.pacing import Pacer
from agentrl_core.rollout.results import TrajectoryResult
from agentrl_core.rollout.session_images import SessionImages
from agentrl_core.rollout.trajectory import TrajectoryBuilder, TrajectoryLimits
from agentrl_core.runs.media import RunImages

logger = logging.getLogger(__name__)


class Servers(Protocol):
    """The part of the router that a session calls."""

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        multi_modal: MultiModal | None = None,
    ) -> TokenOutput: ...

    async def open_session(self, session_id: str) -> None: ...

    async def close_session(self, session_id: str) -> None: ...


@dataclass(frozen=True)
class HostedInteraction:
    """A configured interaction, or an episode in its place, with its deadline."""

    interaction: Interaction
    timeout: float
    kind: Source = "interaction"

    @property
    def title(self) -> str:
        """For messages."""
        return f"{self.kind} {self.interaction.context.name!r}"

    def earned(self, value: float) -> Earned:
        """A reward that it gave."""
        return Earned(self.interaction.context.name, value, self.kind)


def interaction_context(slot: InteractionSlot, seed: int, clients: Mapping[str, EngineClient]) -> InteractionContext:
    """Return what the interaction of a slot gets when it is built."""
    name = slot.registered_name
    return InteractionContext(name, seed, Engines(clients, user=f"interaction {name!r}"))


@dataclass(frozen=True)
class SessionEnvironment:
    """What all sessions of a worker share."""

    renderer: Renderer
    limits: TrajectoryLimits
    servers: Servers
    tools: Mapping[str, HostedTool]
    interactions: Mapping[str, HostedInteraction]
    environments: Mapping[str, HostedEnvironment] = field(default_factory=dict)
    deterministic: bool = False
    adapters: Callable[[str], str] = lambda _: ""
    """What requests of an agent ask the engine for, see ``SamplingParams.adapter``."""
    keeps_version: bool = False
    """A trajectory ends with the version of the adapter with which it began."""
    media: RunImages | None = None
    """The images of the run; None: the model takes text alone."""
    images: ImagesConfig = field(default_factory=ImagesConfig)
    pacer: Pacer = field(default_factory=Pacer)
    reported: set[tuple[str, type[BaseException]]] = field(default_factory=set)
    """Tools with the kinds of failures that the log shows already."""


_EPOCH = time.time() - time.monotonic()


class CallError(ToolError):
    """The policy called an unknown tool or passed wrong arguments; the tool works."""


class _Timed:
    # Not a generator with @contextmanager: a trajectory has twenty of these blocks.
    __slots__ = ("_session", "_what", "_state", "_of_node", "_begun", "start", "seconds")

    def __init__(self, session: "RolloutSession", what: str, state: str, of_node: bool) -> None:
        self._session = session
        self._what = what
        self._state = state
        self._of_node = of_node

    def __enter__(self) -> Self:
        session = self._session
        session.state, session.state_since = self._state, time.monotonic()
        self._begun = session.state_since
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # A cancelled block keeps its state: the message of a trajectory's deadline says what was under way.
        session, report = self._session, self._session.report
        session.state = self._state if kind is asyncio.CancelledError else "in its loop"
        now = session.state_since = time.monotonic()
        report.timings[self._what] = report.timings.get(self._what, 0.0) + now - self._begun
        self.start, self.seconds = round(self._begun + _EPOCH, 4), round(now - self._begun, 5)
        if kind is not None or not self._of_node:
            report.waits.append(Span(self._what, self.start, self.seconds))


class RolloutSession(TrajectorySession):
    """The session of one attempt at one trajectory.

    Args:
        key: identity; its attempt number makes the engine session a fresh one.
        row: the dataset row; the session works on a copy, so that no other attempt or sample meets its changes.
        environment: what the worker shares.
    """

    def __init__(self, key: TrajectoryKey, row: Mapping[str, Any], environment: SessionEnvironment) -> None:
        self.trajectory_id = key.trajectory_id
        self.report = TrajectoryResult(dict(row), key.trajectory_id, Termination.ABORTED)
        self.tree = self.report.tree
        self.state = "starting"
        self.state_since = time.monotonic()
        self._key = key
        self.row: dict[str, Any] = copied(dict(row))
        self._extra: Mapping[str, Any] = self.row.get("extra_info") or {}
        self._env = environment
        self._episode: HostedEpisode | None = None
        self._open_tools: dict[str, HostedTool] | None = None
        self._functions: dict[str, HostedTool | HostedEpisode] = {}
        self._interaction: HostedInteraction | None = None
        self._interaction_asked = False
        self._calling: set[asyncio.Task[Any]] = set()
        self._engine_sessions: set[str] = set()
        self._sampling: set[str] = set()
        # Of each adapter, where the trajectory keeps that with which it began.
        self._versions: dict[str, int] = {}
        self._builder: TrajectoryBuilder | None = None
        self._images = SessionImages(environment.media, environment.images, self.report)
        self.fetch_images = environment.images.urls and environment.media is not None
        self.max_images = environment.images.max_count if environment.media is not None else None

    @property
    def agent(self) -> str:
        return self.tree.agent

    @agent.setter
    def agent(self, agent: str) -> None:
        self.tree.agent = agent

    def trajectory(self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] = ()) -> TrajectoryBuilder:
        builder = TrajectoryBuilder(
            self._key, messages, tools, self._env.renderer, self._env.limits, self._sample, self._builder, self.tree
        )
        self._builder = builder
        longest = self._env.limits.max_model_len - self._env.limits.max_response_length
        if self._episode is not None and builder.num_tokens > longest and not self.tree.turns():
            raise EpisodeError(
                f"the first messages of {self._episode.title} have {builder.num_tokens} tokens (tool schemas "
                f"included), more than data.max_prompt_length={longest}; raise it, or let the environment write less"
            )
        return builder

    @property
    def greedy(self) -> bool:
        """Whether this is the greedy answer to its prompt."""
        return self._key.split.endswith(".greedy")

    def timed(self, what: str, state: str, *, of_node: bool = False) -> "_Timed":
        """Add the time of a ``with`` block to ``timings`` and show its state to the watchdog.

        Args:
            of_node: a node keeps when the block was, unless it fails.
        """
        return _Timed(self, what, state, of_node)

    async def open_engine(self) -> None:
        """Announce the trajectory to the engine, before its first request; once."""
        await self._announce(self._key.request_id)

    async def _announce(self, request_id: str) -> None:
        if request_id not in self._engine_sessions:
            self._engine_sessions.add(request_id)
            await self._env.servers.open_session(request_id)

    async def _sample(
        self, prompt_ids: list[int], params: SamplingParams, request_id: str, multi_modal: MultiModal | None = None
    ) -> tuple[TokenOutput, Request]:
        self._sampling.add(request_id)
        adapter = self._env.adapters(self.agent)
        if adapter:
            params = replace(params, adapter=adapter, version=self._versions.get(adapter))
        try:
            await self._announce(request_id)
            if self._env.deterministic:
                await self._close_idle_branches()
            with self.timed("generate", "generating", of_node=True) as timed:
                media = () if multi_modal is None else (multi_modal,)
                output = await self._env.servers.generate(request_id, prompt_ids, params, *media)
        finally:
            self._sampling.discard(request_id)
        if self._env.keeps_version and adapter and output.spans:
            self._versions.setdefault(adapter, output.spans[0].version)
        await self._env.pacer.wait()
        return output, Request(output.replica, round(output.queued, 5), timed.start, timed.seconds)

    async def _close_idle_branches(self) -> None:
        """Close the engine sessions of branches that rest, for which the engine would wait; their next turn reopens."""
        for idle in sorted(self._engine_sessions - self._sampling):
            self._engine_sessions.discard(idle)
            await self._env.servers.close_session(idle)

    # Environment ------------------------------------------------------------------------------------------------

    async def open_environment(self) -> None:
        """Begin the task of a row that names an environment; its messages become the row's prompt.

        Raises:
            EpisodeError: the environment could not begin it.
        """
        name = self.row.get("environment")
        if name is None:
            return
        environment = self._env.environments.get(name)
        if environment is None:
            raise ConfigError(
                f"the row names the environment {name!r}; configured: {', '.join(self._env.environments) or 'none'}"
            )
        with self.timed("environment", f"opening {environment.title}"):
            self._episode = await environment.open(copied(self.row), self._key.task_seed)
        with boundary(EpisodeError, f"the first messages of {self._episode.title}:", describe=str):
            self.row["raw_prompt"] = await self._images.named(self._episode.messages)
        self.agent = self._episode.agent
        self._interaction = HostedInteraction(self._episode.partner, self._episode.timeout, "environment")
        self._interaction_asked = True

    # Images -----------------------------------------------------------------------------------------------------

    async def image(self, value: Any) -> dict[str, Any]:
        return await self._images.part(value)

    async def image_bytes(self, name: str) -> bytes:
        return await self._images.data(name)

    # Tools ------------------------------------------------------------------------------------------------------

    def _tool_kwargs(self, name: str, which: str) -> dict[str, Any]:
        return dict(((self._extra.get("tools_kwargs") or {}).get(name) or {}).get(which) or {})

    async def open_tools(self) -> list[dict[str, Any]]:
        if self._open_tools is None:
            self._open_tools = {}
            self._functions |= dict.fromkeys(self._episode.schemas, self._episode) if self._episode is not None else {}
            for name in select_tools(self._extra, list(self._env.tools)):
                tool = self._env.tools[name]
                # Before create: a create that fails half-way is released too.
                self._open_tools[name] = tool
                with self.timed("tools", f"creating tool {name!r}"):
                    await tool.call("create", self._key.request_id, kwargs=self._tool_kwargs(name, "create_kwargs"))
                if both := self._functions.keys() & tool.schemas.keys():
                    raise ConfigError(f"tool {name!r} and another one both offer {', '.join(sorted(both))}; rename one")
                self._functions |= dict.fromkeys(tool.schemas, tool)
            self.report.tool_schemas = [tool.schemas[name] for name, tool in self._functions.items()]
        return self.report.tool_schemas

    async def call_tool(self, call: ToolCall) -> ToolOutcome:
        # A call that was pickled, or kept from another trajectory, names a turn that is not of this tree.
        turn = call.turn if call.turn in self.tree.nodes else self.tree.newest
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        self._calling.add(task)
        done = Call(call.name, call.arguments)
        # Before it runs: concurrent calls stand in the order in which the policy wrote them.
        turn.calls.append(done)
        ended = False
        try:
            with self.timed("tools", f"calling tool {call.name!r}", of_node=True) as timed:
                try:
                    with boundary(ToolError, keep=(EngineError,)):
                        result = await self._execute(call, done)
                        content, ended = await self._images.content(result.response.content), result.done
                    text = text_of({"content": content})
                except ToolUnavailableError:
                    raise
                except ToolError as error:
                    content = text = f"Error: {error}"
                    done.failed = True
                    if not isinstance(error, CallError):
                        self._report_failure(call.name, error.__cause__ or error)
        except BaseException:
            # Without an answer it is no call.
            turn.calls.remove(done)
            raise
        finally:
            self._calling.discard(task)
        done.response, done.start, done.seconds = text[:2000], timed.start, timed.seconds
        self.report.count("tool_calls")
        self.report.count("tool_failures", float(done.failed))
        message: Message = {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": content}
        return ToolOutcome(message, ToolResponse(text), done.failed, ended)

    async def _execute(self, call: ToolCall, done: Call) -> ToolResult:
        tool = self._functions.get(call.name)
        if tool is None:
            raise CallError(f"there is no tool {call.name!r}; available: {', '.join(self._functions) or 'none'}")
        properties, required = tool.parameters(call.name)
        missing = [name for name in required if name not in call.arguments]
        unknown = [name for name in call.arguments if properties and name not in properties]
        if missing or unknown:
            raise CallError(
                f"tool {call.name!r} takes the arguments {', '.join(properties) or 'none'}; "
                f"missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}"
            )
        kwargs = self._tool_kwargs(tool.name, "execute_kwargs")
        result = check_result(call.name, await tool.execute(self._key.request_id, call.name, call.arguments, kwargs))
        done.source = "environment" if tool is self._episode else "tool"
        if result.reward is not None:
            done.reward = float(result.reward)
            self.report.count(f"tool/{call.name}/reward", done.reward)
        for name, value in result.metrics.items():
            self.report.count(f"tool/{call.name}/{name}", float(value))
        return result

    def _report_failure(self, name: str, error: BaseException) -> None:
        """Show the first failure of each kind of each tool: a broken tool would look like a bad policy."""
        if (name, type(error)) in self._env.reported:
            return
        self._env.reported.add((name, type(error)))
        trace = getattr(error, "trace", "")
        if not trace and not isinstance(error, ToolError):  # a ToolError is what the tool wants to tell the model
            trace = "".join(traceback.format_exception(error))
        logger.warning(
            "tool %r failed in trajectory %s, and the model reads the error. rollout/tool_failures counts further "
            "failures of this kind. %s%s", name, self.trajectory_id, error, trace and f"\n{trace}",
        )  # fmt: skip

    # Interaction ------------------------------------------------------------------------------------------------

    async def open_interaction(self) -> bool:
        if not self._interaction_asked:
            self._interaction_asked = True
            kwargs = dict(self._extra.get("interaction_kwargs") or {})
            name = kwargs.pop("name", None)
            if name is not None:
                hosted = self._env.interactions.get(name)
                if hosted is None:
                    raise InteractionError(
                        f"the row names the interaction {name!r}; configured: "
                        f"{', '.join(self._env.interactions) or 'none'}"
                    )
                self._interaction = hosted
                start = hosted.interaction.start_interaction(self._key.request_id, **kwargs)
                await self._interact(hosted, start, "starting")
        return self._interaction is not None

    async def interact(self, messages: Sequence[Message]) -> InteractionTurn:
        if not await self.open_interaction() or self._interaction is None:
            raise InteractionError(f"trajectory {self.trajectory_id} has no interaction")
        # Before the answer: another branch may sample while it is awaited.
        node = self.tree.turn_of(messages)
        answer = self._interaction.interaction.generate_response(self._key.request_id, messages)
        turn: InteractionTurn = await self._interact(self._interaction, answer, "waiting for")
        if not isinstance(turn, InteractionTurn) or not isinstance(turn.text, str):
            raise InteractionError(f"generate_response returned {turn!r:.200}, not an InteractionTurn with a text")
        if not isinstance(turn.images, list | tuple):
            raise InteractionError(f"generate_response returned the images {turn.images!r:.100}, not a list")
        if turn.images:
            shows = f"{self._interaction.title} showed an image:"
            with boundary(InteractionError, shows, keep=(EngineError,), describe=str):
                shown = await self._images.content([*map(image_part, turn.images)])
            turn = turn._replace(images=parts_of({"content": shown}))
        if turn.agent is not None and not isinstance(turn.agent, str):
            raise InteractionError(f"generate_response named the agent {turn.agent!r}, not a text")
        numbers = {f"metric {key}": value for key, value in turn.metrics.items()}
        if turn.reward is not None:
            numbers["reward"] = turn.reward
        for what, value in numbers.items():
            if not is_finite(value):
                raise InteractionError(f"generate_response returned the {what}={value!r}, not a finite number")
        if turn.reward is not None:
            node.rewards.append(self._interaction.earned(float(turn.reward)))
        for name, value in turn.metrics.items():
            self.report.count(f"interaction/{name}", float(value))
        self.agent = self.agent if turn.agent is None else turn.agent
        return turn

    async def _interact(self, hosted: HostedInteraction, call: Awaitable[Any], what: str) -> Any:
        with self.timed(hosted.kind, f"{what} {hosted.title}"):
            late = f"{hosted.title}: no answer within {hosted.timeout:g} s"
            return await within(hosted.timeout, call, late, InteractionError)

    # The end ----------------------------------------------------------------------------------------------------

    async def collect_rewards(self) -> None:
        """Ask every open tool for the reward of its final state, and the interaction for its score.

        Raises:
            RewardError: one of them is not a finite number. What user code raises comes through.
        """
        for name, tool in (self._open_tools or {}).items():
            kwargs = self._tool_kwargs(name, "calc_reward_kwargs")
            with self.timed("tools", f"calc_reward of tool {name!r}"):
                reward = await tool.call("calc_reward", self._key.request_id, kwargs=kwargs)
            if reward is not None:
                value = _number(reward, f"calc_reward of tool {name!r}")
                self.tree.newest.rewards.append(Earned(name, value, "tool"))
                self.report.count(f"tool/{name}/reward", value)
        if self._interaction is not None:
            score = self._interaction.interaction.calculate_score(self._key.request_id)
            value = await self._interact(self._interaction, score, "scoring")
            if value is not None:
                value = _number(value, "calculate_score of the interaction")
                self.tree.newest.rewards.append(self._interaction.earned(value))

    async def score_episode(self, trajectory: RewardTrajectory, part: TrajectoryResult) -> RewardTrajectory:
        """The trajectory with what its environment gives: what its calls and replies earned is only there.

        Args:
            trajectory: of one agent.
            part: its result.

        Raises:
            RewardError: its score failed, or is not a finite number.
        """
        if self._episode is None:
            return trajectory
        earned = [(turn, reward.value) for turn, reward in part.earned("environment")]
        with self.timed("environment", f"being scored by {self._episode.title}"):
            return replace(trajectory, environment=await self._episode.score(trajectory, earned))

    async def close(self) -> None:
        """Release everything that was opened. Never raises: a failure is logged and counted."""
        # A loop that failed may have left calls, which must not use what is released here.
        if self._calling:
            for task in self._calling:
                task.cancel()
            await asyncio.wait(self._calling)
        if self._episode is not None:
            await self._quietly(self._episode.close(), f"close of the episode of {self._episode.title}")
        for name, tool in (self._open_tools or {}).items():
            await self._quietly(self._release(name, tool), f"release of tool {name!r}")
        if self._interaction is not None:
            end = self._interaction.interaction.finalize_interaction(self._key.request_id)
            await self._quietly(self._interact(self._interaction, end, "ending"), "finalize_interaction")
        for session in sorted(self._engine_sessions):
            await self._quietly(self._env.servers.close_session(session), "close_session of the engine")
        self._open_tools = {}
        self._functions = {}
        self._episode = self._interaction = None
        self._engine_sessions.clear()

    async def _release(self, name: str, tool: HostedTool) -> None:
        await tool.release(self._key.request_id, self._tool_kwargs(name, "release_kwargs"))

    async def _quietly(self, call: Awaitable[Any], what: str) -> None:
        try:
            await call
        except Exception:  # noqa: BLE001 - the other releases must still run
            self.report.count("release_failures")
            logger.warning("trajectory %s: %s failed", self.trajectory_id, what, exc_info=True)


def _number(value: Any, who: str) -> float:
    if not is_finite(value):
        raise RewardError(f"{who} returned {value!r}, which is not a finite number")
    return float(value)


def copied(value: Any) -> Any:
    """The value with dicts and lists of its own, at any depth; other objects are shared."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [copied(item) for item in value]
    return value
