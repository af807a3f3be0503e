"""The environments of a worker, and each trajectory's episode as the tools and the partner that a session knows."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl_core.api import (
    EngineClient,
    Engines,
    Environment,
    EnvironmentContext,
    Episode,
    EpisodeError,
    Interaction,
    InteractionContext,
    InteractionError,
    InteractionTurn,
    Message,
    PluginBrokenError,
    RewardError,
    RewardResult,
    RewardTrajectory,
    ToolError,
)
from agentrl_core.config.schema import EnvironmentSlot
from agentrl_core.hosting.rewards import check_score
from agentrl_core.plugins.boundary import boundary, deadline, within

NOT_THE_TASK = ("uid", "prompt_index", "sample_index", "environment")
"""Keys of a row that the trainer added."""


class HostedEnvironment:
    """One configured environment with its deadline.

    Args:
        slot: a resolved slot of the configuration.
        seed: seed of the run.
        clients: of the named engines.
        shows_images: the model can be shown images.
    """

    def __init__(
        self,
        slot: EnvironmentSlot,
        seed: int,
        clients: Mapping[str, EngineClient] | None = None,
        shows_images: bool = False,
    ) -> None:
        self.name = slot.registered_name
        self.title = f"environment {self.name!r}"
        self.timeout = slot.timeout
        context = EnvironmentContext(self.name, seed, Engines(clients, user=self.title), shows_images)
        self.environment: Environment = slot.build(context)
        if not isinstance(self.environment, Environment):
            kind = type(self.environment).__name__
            raise PluginBrokenError(
                f"{self.title}: its factory built a {kind}, not an Environment; a class without this base needs a "
                "method `reset`"
            )

    async def open(self, row: Mapping[str, Any], seed: int) -> "HostedEpisode":
        """Begin the task of a row.

        Raises:
            EpisodeError: ``open`` raised, passed the deadline, or returned no episode with messages and valid tools.
        """
        task = {key: value for key, value in row.items() if key not in NOT_THE_TASK}
        if not task.get("raw_prompt"):
            task.pop("raw_prompt", None)

        def shown() -> str:
            return f"{self.title} could not begin the task {str(task):.200} with seed {seed}:"

        with boundary(EpisodeError, shown):
            async with deadline(self.timeout, lambda: f"{shown()} no answer within {self.timeout:g} s"):
                episode = await self.environment.open(task, seed)
            if not isinstance(episode, Episode):
                raise ValueError(f"`open` returned a {type(episode).__name__}, must be an Episode")
            hosted = HostedEpisode(episode, self)
            try:
                hosted.check()
            except ValueError:
                await hosted.close()
                raise
        return hosted

    async def close(self) -> None:
        """Release what all episodes share."""
        async with deadline(self.timeout, f"close of {self.title}: no answer within {self.timeout:g} s"):
            await self.environment.close()


class HostedEpisode:
    """An episode within deadlines, one call at a time.

    Attributes:
        schemas: of its tools by name; it runs them like a :class:`~agentrl_core.hosting.tools.HostedTool`.
        partner: answers turns without a call.
    """

    def __init__(self, episode: Episode, environment: HostedEnvironment) -> None:
        self._episode = episode
        self._lock = asyncio.Lock()
        self._ended = False
        self.title = environment.title
        self.timeout = environment.timeout
        self.name = environment.name
        self.schemas: dict[str, dict[str, Any]] = {}
        self.partner = EpisodePartner(self, environment.name)

    @property
    def messages(self) -> list[Message]:
        """The first messages."""
        return [dict(message) for message in self._episode.messages]

    @property
    def agent(self) -> str:
        """Who answers them; empty where only one agent acts."""
        return self._episode.agent

    @property
    def replies(self) -> bool:
        """Whether the episode answers turns without a call."""
        return type(self._episode).reply is not Episode.reply

    def check(self) -> None:
        """Check messages, tools and agent.

        Raises:
            ValueError: says what is wrong with them.
        """
        messages, tools = self._episode.messages, self._episode.tools
        if not isinstance(messages, list | tuple) or not messages:
            raise ValueError(f"`messages` of the episode is {messages!r:.100}; set a list with at least one message")
        for message in messages:
            if not (isinstance(message, Mapping) and isinstance(message.get("role"), str)):
                raise ValueError(f"the message {message!r:.100} has no role; write {{'role': 'user', 'content': …}}")
            if not isinstance(message.get("content"), str | list):
                raise ValueError(f"the content of the message {message!r:.100} is no text and no list of parts")
        if not isinstance(self._episode.agent, str):
            raise ValueError(f"`agent` of the episode is {self._episode.agent!r}; set the name of who answers first")
        for tool in tools:
            if not isinstance(tool, Mapping) or not isinstance((tool.get("function") or {}).get("name"), str):
                raise ValueError(f"the tool {tool!r:.100} is no OpenAI function schema; make it with function_schema()")
        self.schemas = {tool["function"]["name"]: dict(tool) for tool in tools}

    def parameters(self, function: str) -> tuple[Mapping[str, Any], Sequence[str]]:
        """The schemas of a tool's parameters by name, and the names of the required ones."""
        parameters = self.schemas[function]["function"].get("parameters") or {}
        return parameters.get("properties", {}), parameters.get("required", ())

    async def execute(
        self, instance_id: str, function: str, arguments: Mapping[str, Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """The result of a tool call."""
        async with self._lock:
            if self._ended:
                raise ToolError("the episode has ended; no further calls are answered")
            result = await self.bounded(self._episode.call(function, dict(arguments)), f"call of {function!r}")
            self._ended = getattr(result, "done", False) is True
            return result

    async def reply(self, messages: Sequence[Message]) -> InteractionTurn:
        """The answer to a turn without a call."""
        async with self._lock:
            if self._ended:
                return InteractionTurn(terminate=True, text="")
            turn = await self.bounded(self._episode.reply(messages), "reply", InteractionError)
            self._ended = getattr(turn, "terminate", False) is True
            return turn  # type: ignore[no-any-return] # the session checks it

    async def score(self, trajectory: RewardTrajectory, earned: Sequence[tuple[int, float]]) -> RewardResult:
        """The score, and what calls and replies earned.

        Args:
            trajectory: what the episode sees.
            earned: turn and reward of each call and reply.

        Raises:
            RewardError: ``score`` raised, passed its deadline, or returned no finite number.
        """
        async with self._lock:
            with boundary(RewardError, f"score of {self.title} raised"):
                value = await self.bounded(self._episode.score(trajectory), "score", RewardError)
        result = check_score(self.title, value)
        by_turn = dict(enumerate(result.turn_rewards))
        for turn, reward in earned:
            by_turn[turn] = by_turn.get(turn, 0.0) + reward
        turn_rewards = [by_turn.get(turn, 0.0) for turn in range(max(by_turn, default=-1) + 1)]
        return replace(result, score=result.score + sum(reward for _, reward in earned), turn_rewards=turn_rewards)

    async def close(self) -> None:
        """Release the episode, also one whose last call was cancelled."""
        await self.bounded(self._episode.close(), "close")

    async def bounded(self, call: Awaitable[Any], what: str, error: type[Any] = ToolError) -> Any:
        """The result of a coroutine of the episode within the deadline."""
        late = f"{what} of {self.title}: no answer within {self.timeout:g} s"
        return await within(self.timeout, call, late, error)


class EpisodePartner(Interaction):
    """The episode as an interaction."""

    def __init__(self, episode: HostedEpisode, name: str) -> None:
        super().__init__(None, InteractionContext(name))
        self._episode = episode

    async def generate_response(
        self, instance_id: str, messages: Sequence[dict[str, Any]], **kwargs: Any
    ) -> InteractionTurn:
        return await self._episode.reply(messages)
