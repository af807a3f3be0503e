"""The chat endpoint of one agent-loop worker: one socket, one conversation per run token."""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Iterator, Mapping
from typing import Any

from agentrl_core.api import AgentLoopOutput, ChatEndpoint, ConfigError, Termination, TrajectorySession
from agentrl_core.config.schema import EndpointConfig
from agentrl_core.rollout.endpoint.conversation import Conversation

logger = logging.getLogger(__name__)

MODEL_NAME = "policy"
"""The one model that every endpoint serves."""


class EndpointServer:
    """Serves conversations over HTTP, in the event loop of who asks first. Starts with the first conversation."""

    def __init__(self, config: EndpointConfig) -> None:
        self._config = config
        self._conversations: dict[str, Conversation] = {}
        self._server: Any = None
        self._task: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self.base_url = ""

    async def open(self, session: TrajectorySession, sampling_params: Mapping[str, Any]) -> "OpenEndpoint":
        """An endpoint for one trajectory.

        Raises:
            ConfigError: what serves it is not installed, or its address cannot be had.
        """
        async with self._starting:
            if self._task is None:
                await self._start()
        token = f"agentrl-{secrets.token_urlsafe(24)}"
        conversation = self._conversations[token] = Conversation(session, sampling_params)
        return OpenEndpoint(self, token, conversation)

    def forget(self, token: str) -> None:
        """Requests with this token are refused from now on."""
        self._conversations.pop(token, None)

    async def _start(self) -> None:
        try:
            import uvicorn

            from agentrl_core.rollout.endpoint.app import ChatApp
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"the chat endpoint needs {error.name}, which is not installed: pip install 'agentrl-core[endpoint]'"
            ) from error

        class Server(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                # Signals belong to the run.
                yield

        listener = self._listen()
        host, port = listener.getsockname()[:2]
        app = ChatApp(self._conversations, MODEL_NAME, self._config.max_body_bytes).app
        self._server = Server(
            uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=5)
        )
        self._task = asyncio.ensure_future(self._server.serve(sockets=[listener]))
        while not self._server.started:
            if self._task.done():
                raise ConfigError(f"the chat endpoint on {host}:{port} ended as it started") from self._task.exception()
            await asyncio.sleep(0.01)
        self.base_url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        logger.info("chat endpoint at %s", self.base_url)

    def _listen(self) -> socket.socket:
        host = self._config.host
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, kind, protocol)
            listener.bind(address)
            return listener
        except OSError as error:
            raise ConfigError(
                f"rollout.endpoint.host: {host!r} is not an address of this machine ({error}); "
                "127.0.0.1 serves agents that run here"
            ) from error

    async def close(self) -> None:
        """Stop serving; may be called twice."""
        task, self._task = self._task, None
        if task is not None:
            self._conversations.clear()
            self._server.should_exit = True
            await asyncio.wait({task})


class OpenEndpoint(ChatEndpoint):
    """The endpoint of one trajectory."""

    def __init__(self, server: EndpointServer, token: str, conversation: Conversation) -> None:
        self.base_url = server.base_url
        self.api_key = token
        self.model = MODEL_NAME
        self._server = server
        self._conversation = conversation

    @property
    def exhausted(self) -> bool:
        return self._conversation.exhausted

    def finish(self, termination: Termination) -> list[AgentLoopOutput]:
        return self._conversation.finish(termination)

    def close(self) -> None:
        """Its key is worth nothing from now on."""
        self._server.forget(self.api_key)
