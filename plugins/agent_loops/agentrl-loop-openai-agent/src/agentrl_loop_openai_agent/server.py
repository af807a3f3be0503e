"""The chat endpoint of one agent loop in one worker: one socket, one conversation per key."""

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from agentrl_core.api import ConfigError, TrajectorySession
from agentrl_loop_openai_agent.app import ChatApp
from agentrl_loop_openai_agent.config import OpenAIAgentConfig
from agentrl_loop_openai_agent.conversation import Conversation
from agentrl_loop_openai_agent.wire import Decode

logger = logging.getLogger(__name__)

MODEL_NAME = "policy"
"""The only model of every endpoint."""

IDLE_SECONDS = 30.0
"""A connection on which no whole request head arrives for that long is closed."""


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Signals belong to the run.
        yield


class _Protocol(H11Protocol):
    """HTTP/1.1 that closes connections beyond a limit, and those on which no request gets complete.

    uvicorn's own time limit holds only between two requests.
    """

    max_connections: ClassVar[int]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()
        else:
            self._watch(self)

    def _watch(self, before: object) -> None:
        """Close the connection if it waits for the same request as one period ago."""
        waits_after = self.cycle if self.cycle is None or self.cycle.response_complete else object()
        if waits_after is before:
            self.transport.close()
        if not self.transport.is_closing():
            self.loop.call_later(IDLE_SECONDS, self._watch, waits_after)


class EndpointServer:
    """Serves conversations over HTTP, in the event loop of the first caller of :meth:`open`, which starts it.

    ``capabilities`` are the engine's.
    """

    def __init__(self, config: OpenAIAgentConfig, decode: Decode, capabilities: frozenset[str] = frozenset()) -> None:
        self._config = config
        self._decode = decode
        self._capabilities = capabilities
        self._conversations: dict[str, Conversation] = {}
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self.base_url = ""

    @asynccontextmanager
    async def open(
        self, session: TrajectorySession, sampling_params: Mapping[str, Any]
    ) -> AsyncIterator[tuple[str, Conversation]]:
        """The key of one trajectory and what is said with it; the key expires with the block.

        Raises:
            ConfigError: the server cannot listen on its address.
        """
        async with self._starting:
            if self._task is None:
                await self._start()
        key = f"agentrl-{secrets.token_urlsafe(24)}"
        conversation = self._conversations[key] = Conversation(session, sampling_params, self._config.max_branches)
        try:
            yield key, conversation
        finally:
            self._conversations.pop(key, None)

    async def _start(self) -> None:
        listener = self._listen()
        host, port = listener.getsockname()[:2]
        protocol = type("Protocol", (_Protocol,), {"max_connections": self._config.max_connections})
        app = ChatApp(self._conversations, MODEL_NAME, self._config, self._decode, self._capabilities).app
        self._server = _Server(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=5,
            )
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
                f"host of the agent loop openai_agent: {host!r} is not an address of this machine ({error}); "
                "127.0.0.1 serves agents that run here"
            ) from error

    async def close(self) -> None:
        """Stop serving; may be called twice."""
        task, self._task = self._task, None
        if task is not None and self._server is not None:
            self._conversations.clear()
            self._server.should_exit = True
            await asyncio.wait({task})
