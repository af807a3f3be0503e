"""Runs an agent that knows nothing of training: it gets the address of an endpoint and talks to it."""

import importlib
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from agentrl_core.api import (
    AgentLoopBase,
    AgentLoopContext,
    AgentLoopOutput,
    AgentRLError,
    ConfigError,
    Message,
    Termination,
    TrajectorySession,
)
from agentrl_loop_openai_agent.config import OpenAIAgentConfig
from agentrl_loop_openai_agent.images import as_sent
from agentrl_loop_openai_agent.server import MODEL_NAME, EndpointServer

Agent = Callable[..., Awaitable[Any]]


class OpenAIAgentLoop(AgentLoopBase):
    """Awaits ``agent(base_url=…, api_key=…, model=…, messages=…, row=…, **kwargs)`` for each trajectory.

    ``messages`` is the row's prompt, with images as data URLs, ``row`` its other fields. What the agent returns is the
    trajectory's reward if it is a number; None leaves the reward to the reward manager. An exception of the agent fails
    the trajectory, unless the budget was spent: that ends it with ``length``.
    """

    config: OpenAIAgentConfig

    def __init__(self, config: OpenAIAgentConfig, context: AgentLoopContext) -> None:
        super().__init__(config, context)
        self.agent = load_agent(config.agent)
        self.server = EndpointServer(config, context.renderer.decode, context.engine_capabilities)

    async def run(
        self, sampling_params: dict[str, Any], *, session: TrajectorySession, raw_prompt: list[Message], **row: Any
    ) -> list[AgentLoopOutput]:
        async with self.server.open(session, sampling_params) as (key, conversation):
            reward = None
            try:
                reward = await self.agent(
                    base_url=self.server.base_url,
                    api_key=key,
                    model=MODEL_NAME,
                    messages=await as_sent(raw_prompt, session),
                    row=row,
                    **self.config.kwargs,
                )
            except Exception:
                if not conversation.exhausted:
                    # An engine that failed is the cause; the client's own error is only its echo.
                    conversation.finish(Termination.ABORTED)
                    raise
            outputs = conversation.finish(Termination.LENGTH if conversation.exhausted else Termination.COMPLETED)
        if not outputs:
            raise AgentRLError(f"the agent {name_of(self.agent)} returned without asking the endpoint for anything")
        if reward is not None:
            outputs[-1].reward_score = reward
        return outputs

    async def close(self) -> None:
        await self.server.close()


def load_agent(named: Any) -> Agent:
    """The async function: ``named`` itself, or the one of that name in an installed package.

    Raises:
        ConfigError: it is not there, or is not async.
    """
    key = "agent of the agent loop openai_agent"
    agent = named
    if isinstance(named, str):
        module, _, attribute = named.rpartition(":")
        if not module or not attribute:
            raise ConfigError(
                f"{key}: found {named!r}, expected 'package.module:function' or 'path/to/file.py:function'"
            )
        try:
            agent = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{key}: {named!r} cannot be loaded: {error}") from error
    if not inspect.iscoroutinefunction(agent) and not inspect.iscoroutinefunction(getattr(agent, "__call__", None)):  # noqa: B004 - an object with an async __call__ is an agent too
        raise ConfigError(f"{key}: {name_of(agent)} is not an async function: define it with `async def`")
    return agent  # type: ignore[no-any-return]


def name_of(agent: Any) -> str:
    """How messages name an agent."""
    return repr(getattr(agent, "__qualname__", agent))
