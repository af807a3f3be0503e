"""The functions of MCP servers as one tool of a run."""

import asyncio
import logging
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import mcp_types

from agentrl_core.api import (
    ConfigError,
    Tool,
    ToolContext,
    ToolError,
    ToolResponse,
    ToolResult,
    ToolUnavailableError,
)
from agentrl_tool_mcp.config import McpConfig, ServerConfig
from agentrl_tool_mcp.session import Session

logger = logging.getLogger(__name__)
SHARED = ""
_listed: dict[str, dict[str, mcp_types.Tool]] = {}


class Function(NamedTuple):
    """Where a function of the model comes from."""

    server: str
    tool: mcp_types.Tool


class McpTool(Tool):
    """Offers the tools of all servers under their names and schemas.

    Raises:
        ConfigError: a server cannot be used, lacks a tool of the option ``tools``, or two have functions of one name.
    """

    config: McpConfig

    def __init__(self, config: McpConfig, context: ToolContext) -> None:
        super().__init__(config, context)
        if not config.servers:
            raise ConfigError("servers is empty; name at least one MCP server with its command or url")
        self._functions: dict[str, Function] = {}
        for name, server in config.servers.items():
            for tool in _chosen(name, server, config):
                self._add(name, tool)
        self._sessions: dict[tuple[str, str], Session] = {}
        self._locks: dict[tuple[str, str], asyncio.Lock] = {}
        self._ready: dict[str, list[asyncio.Task[Session]]] = {name: [] for name in config.servers}
        self._starting = asyncio.Semaphore(config.max_starting)

    def _add(self, server: str, tool: mcp_types.Tool) -> None:
        full = f"{server}_{tool.name}" if self.config.prefix else tool.name
        function = re.sub(r"[^A-Za-z0-9_-]", "_", full)[:64]
        if function in self._functions:
            other = self._functions[function]
            raise ConfigError(
                f"tool {tool.name!r} of MCP server {server!r} and tool {other.tool.name!r} of {other.server!r} would "
                f"both be called {function!r}. Set `prefix: true`, or leave one out with the server's option `tools`"
            )
        self._functions[function] = Function(server, tool)

    @property
    def schemas(self) -> Sequence[dict[str, Any]]:
        return [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": tool.description or tool.title or tool.name,
                    "parameters": {"type": "object", "properties": {}, **tool.input_schema},
                },
            }
            for name, (_, tool) in self._functions.items()
        ]

    async def create(self, instance_id: str, **create_kwargs: Any) -> None:
        # The policy samples its first turn meanwhile.
        if self.config.session == "trajectory":
            for server in self._ready:
                self._open_ahead(server, self.config.ready)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], function: str = "", **execute_kwargs: Any
    ) -> ToolResult:
        if function not in self._functions:
            raise ToolError(f"there is no function {function!r}")
        server, tool = self._functions[function]
        session = await self._session(instance_id, server)
        parts = await session.call(tool.name, parameters, tool.input_schema)
        return ToolResult(ToolResponse("", parts=parts))

    async def _session(self, instance_id: str, server: str) -> Session:
        """The session of a trajectory, or the worker's, opened at the first call.

        A shared one that died is opened again. That of a trajectory is not: its state is lost.
        """
        owner = SHARED if self.config.session == "shared" else instance_id
        key = owner, server
        async with self._locks.setdefault(key, asyncio.Lock()):
            session = self._sessions.get(key)
            if session is None or (owner == SHARED and not session.alive):
                session = await (self._opened(server) if owner == SHARED else self._unused(server))
                self._sessions[key] = session
            return session

    async def _opened(self, server: str) -> Session:
        limit = self.config.max_body_bytes
        session = Session(server, self.config.servers[server], limit, self.context.shows_images)
        try:
            async with asyncio.timeout(self.config.start_timeout), self._starting:
                await session.open(self.config.start_timeout)
        except TimeoutError:
            limit = f"start_timeout of {self.config.start_timeout:g} s"
            raise ToolUnavailableError(f"MCP server {server!r}: no session within the {limit}") from None
        return session

    def _open_ahead(self, server: str, count: int) -> None:
        waiting = self._ready[server]
        while len(waiting) < count:
            waiting.append(asyncio.create_task(self._opened(server), name=f"open MCP server {server}"))

    async def _unused(self, server: str) -> Session:
        """A session that no trajectory has used, opened ahead or now."""
        waiting = self._ready[server]
        while True:
            self._open_ahead(server, self.config.ready + 1)
            task = waiting.pop(0)
            waited = task.done()
            if waited and task.exception() is not None:
                # What failed some time ago may work now.
                continue
            try:
                session = await task
                if not waited or await session.answers(self.config.start_timeout):
                    return session
            except asyncio.CancelledError:
                if task.done() and not task.cancelled():
                    waiting.insert(0, task)
                raise
            await session.close()

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        await self._close(instance_id)

    async def close(self) -> None:
        await self._close(SHARED)
        tasks = [task for waiting in self._ready.values() for task in waiting]
        for waiting in self._ready.values():
            waiting.clear()
        for task in tasks:
            task.cancel()
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(found, Session):
                await found.close()

    async def _close(self, owner: str) -> None:
        for key in [key for key in self._sessions if key[0] == owner]:
            self._locks.pop(key, None)
            await self._sessions.pop(key).close()


def _chosen(name: str, config: ServerConfig, run: McpConfig) -> list[mcp_types.Tool]:
    """The tools of a server that the model may call, asked for once in a process."""
    where = f"servers.{name}"
    if bool(config.command) == bool(config.url):
        raise ConfigError(f"{where}: give either command (a server over stdio) or url (a server over HTTP)")
    key = repr(replace(config, tools=[]))
    if key not in _listed:
        began = time.monotonic()
        try:
            _listed[key] = _in_thread(name, config, run)
        except ToolUnavailableError as error:
            raise ConfigError(f"{where}: {error}") from error
        if run.session == "trajectory" and config.command:
            logger.info(
                "MCP server %r took %.1f s to start, as it will for each trajectory that calls it. "
                "Set `session: shared` if it keeps no state, or `ready` to start servers ahead",
                name,
                time.monotonic() - began,
            )
    tools = _listed[key]
    if unknown := [tool for tool in config.tools if tool not in tools]:
        raise ConfigError(f"{where}.tools: the server has no {', '.join(unknown)}; it has {', '.join(tools) or 'none'}")
    if not tools:
        raise ConfigError(f"{where}: the server has no tools")
    return [tools[tool] for tool in config.tools or tools]


def _in_thread(name: str, config: ServerConfig, limits: McpConfig) -> dict[str, mcp_types.Tool]:
    """List a server's tools, whether or not an event loop runs in this thread."""
    results: list[Mapping[str, mcp_types.Tool] | BaseException] = []

    async def main() -> Mapping[str, mcp_types.Tool]:
        session = Session(name, config, limits.max_body_bytes)
        await session.open(limits.start_timeout)
        await session.close()
        return session.tools

    def run() -> None:
        try:
            results.append(asyncio.run(main()))
        except BaseException as error:  # noqa: BLE001 - raised in the thread that asked
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(results[0], BaseException):
        raise results[0]
    return dict(results[0])
