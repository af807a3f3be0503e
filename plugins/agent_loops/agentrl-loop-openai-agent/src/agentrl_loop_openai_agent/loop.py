"""Runs an agent that knows nothing of training: it gets the address of an endpoint and talks to it."""

import importlib
import importlib.util
import inspect
from collections.abc import Awaitable, Callable
from pathlib import Path
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
from agentrl_loop_openai_agent.server import MODEL_NAME, EndpointServer

Agent = Callable[..., Awaitable[Any]]


class OpenAIAgentLoop(AgentLoopBase):
    """Awaits ``agent(base_url=…, api_key=…, model=…, messages=…, row=…, **kwargs)`` for each trajectory.

    ``messages`` is the row's prompt, ``row`` its other fields. What the agent returns is the trajectory's reward if it
    is a number; None leaves the reward to the reward manager. An exception of the agent fails the trajectory, unless
    the budget was spent: that ends it with ``length``.
    """

    config: OpenAIAgentConfig

    def __init__(self, config: OpenAIAgentConfig, context: AgentLoopContext) -> None:
        super().__init__(config, context)
        self.agent = load_agent(config.agent)
        self.server = EndpointServer(config)

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
                    messages=raw_prompt,
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
            raise AgentRLError(f"the agent {self.config.agent} returned without asking the endpoint for anything")
        if reward is not None:
            outputs[-1].reward_score = reward
        return outputs

    async def close(self) -> None:
        await self.server.close()


def load_agent(name: str) -> Agent:
    """The async function of that name.

    Raises:
        ConfigError: it is not there, or is not async.
    """
    where, _, attribute = name.rpartition(":")
    key = "agent of the agent loop openai_agent"
    if not where or not attribute:
        raise ConfigError(f"{key}: found {name!r}, expected 'package.module:function' or 'path/to/file.py:function'")
    try:
        module = _from_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
        agent = getattr(module, attribute)
    except (ImportError, OSError, AttributeError) as error:
        raise ConfigError(f"{key}: {name!r} cannot be loaded: {error}") from error
    if not inspect.iscoroutinefunction(agent) and not inspect.iscoroutinefunction(getattr(agent, "__call__", None)):  # noqa: B004 - an object with an async __call__ is an agent too
        raise ConfigError(f"{key}: {name!r} is not an async function: define it with `async def`")
    return agent  # type: ignore[no-any-return]


def _from_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"agentrl_openai_agent_{path.stem}", path.resolve())
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
