"""One session with an MCP server, owned by a task: the SDK wants it closed by the task that opened it."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import httpx2
import mcp
import mcp_types
from mcp.client.stdio import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client

from agentrl_core.api import HttpError, ToolError, ToolUnavailableError, bounded_body
from agentrl_core.api.message_parts import image_part
from agentrl_tool_mcp.config import ServerConfig
from agentrl_tool_mcp.stdio import bounded_stdio

Part = str | dict[str, Any]
LOST = {mcp_types.CONNECTION_CLOSED}


class Session:
    """An open session.

    Args:
        name: of the server.
        config: how to reach it.
        max_body_bytes: longest answer, and over HTTP longest event of a stream.
        shows_images: the model can be shown images; otherwise a text says that there is one.
    """

    def __init__(self, name: str, config: ServerConfig, max_body_bytes: int, shows_images: bool = False) -> None:
        self.name = name
        self._shows_images = shows_images
        self._limit = max_body_bytes
        self.tools: dict[str, mcp_types.Tool] = {}
        self._config = config
        self._client: mcp.Client | None = None
        self._stop = asyncio.Event()
        self._owner: asyncio.Task[None] | None = None

    async def open(self, timeout: float) -> None:
        """Connect and list the tools.

        Raises:
            ToolUnavailableError: the server did not start, or not in time. It says why.
        """
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._own(opened))
        try:
            async with asyncio.timeout(timeout):
                await asyncio.shield(opened)
        except BaseException as error:
            await asyncio.shield(self.close())
            if isinstance(error, TimeoutError):
                raise ToolUnavailableError(f"MCP server {self.name!r} did not answer within {timeout:g} s") from None
            raise

    async def _own(self, opened: asyncio.Future[None]) -> None:
        log = bytearray()
        try:
            async with AsyncExitStack() as stack:
                self._client = await stack.enter_async_context(await self._connect(stack, log))
                await self._list()
                opened.set_result(None)
                await self._stop.wait()
        except Exception as error:  # noqa: BLE001 - the SDK raises anything, in groups
            if not opened.done():
                said = log.decode(errors="replace").strip()
                reason = f"{_innermost(error)}{f'; it wrote: {said}' if said else ''}"
                what = " ".join(self._config.command) or self._config.url
                message = f"MCP server {self.name!r} ({what}) cannot be used: {reason}"
                opened.set_exception(ToolUnavailableError(message))
        finally:
            self._client = None

    async def _connect(self, stack: AsyncExitStack, log: bytearray) -> mcp.Client:
        if self._config.command:
            program, *arguments = self._config.command
            env = {name: os.environ[name] for name in self._config.env if name in os.environ}
            parameters = StdioServerParameters(command=program, args=arguments, env=env, cwd=self._config.cwd)
            return mcp.Client(bounded_stdio(parameters, log, self._limit), cache=None)
        else:
            # Compression would only make the limit harder to keep.
            headers = {**self._config.headers, "accept-encoding": "identity"}
            http = await stack.enter_async_context(create_mcp_http_client(headers=headers))
            http.event_hooks = {"request": [], "response": [self._bound]}
            url, limit = self._config.url or "", self._limit
            transport = streamable_http_client(url, http_client=http, max_sse_event_size=limit)
        return mcp.Client(transport, cache=None)

    async def _bound(self, response: httpx2.Response) -> None:
        encoding = response.headers.pop("content-encoding", "")
        # A stream of events may be long; the SDK limits each of them.
        streams = response.headers.get("content-type", "").startswith("text/event-stream")
        response.stream = _BoundedStream(response, encoding, None if streams else self._limit)

    async def _list(self) -> None:
        assert self._client is not None, "open"
        tools, cursor = {}, None
        while True:
            page = await self._client.list_tools(cursor=cursor)
            tools |= {tool.name: tool for tool in page.tools}
            cursor = page.next_cursor
            if not cursor:
                break
        self.tools = tools

    async def call(self, tool: str, arguments: Mapping[str, Any], shown: Mapping[str, Any]) -> list[Part]:
        """Call a tool; returns the texts and images of its result, in order.

        Args:
            shown: the input schema that the model was shown.

        Raises:
            ToolError: the tool said that the call failed.
            ToolUnavailableError: the server died, or is not the one that the model was shown any more.
        """
        if self._client is None:
            raise ToolUnavailableError(f"MCP server {self.name!r} is gone")
        self._check(tool, shown)
        try:
            try:
                result = await self._client.call_tool(tool, dict(arguments))
                parts, failed = parts_of(result.content, self._shows_images), result.is_error
            except mcp.MCPError as error:
                if error.code in LOST:
                    raise
                parts, failed = [str(error)], True
            if failed:
                # The model's fault, unless the tool is not the one that it was shown.
                await self._list()
        except (mcp.MCPError, OSError) as error:
            await self.close()
            raise ToolUnavailableError(f"MCP server {self.name!r} died in a call of {tool!r}: {error}") from error
        if failed:
            self._check(tool, shown)
            raise ToolError("\n".join(part for part in parts if isinstance(part, str)) or "the tool failed")
        return parts

    def _check(self, tool: str, shown: Mapping[str, Any]) -> None:
        if tool not in self.tools or self.tools[tool].input_schema != shown:
            what = "has another schema" if tool in self.tools else "is gone"
            raise ToolUnavailableError(
                f"MCP server {self.name!r} changed its tools: {tool!r} {what} since the start of the run. "
                "Start the run again to train with the new ones"
            )

    async def answers(self, timeout: float) -> bool:
        """The server is still there."""
        try:
            async with asyncio.timeout(timeout):
                if self._client is not None:
                    await self._list()
        except (mcp.MCPError, OSError, TimeoutError):
            return False
        return self._client is not None

    @property
    def alive(self) -> bool:
        """The session is open, as far as it is known."""
        return self._client is not None and not self._stop.is_set()

    async def close(self) -> None:
        """Close the session, and end a server that this session started."""
        self._stop.set()
        if self._owner is not None:
            if self._client is None:
                # Still connecting: there is nothing that waits for the event.
                self._owner.cancel()
            await asyncio.wait([self._owner])


class _BoundedStream(httpx2.AsyncByteStream):
    """The body of a response, decompressed within a limit; the SDK turns its errors into answers to the request."""

    def __init__(self, response: httpx2.Response, encoding: str, limit: int | None) -> None:
        assert isinstance(response.stream, httpx2.AsyncByteStream), "the client is asynchronous"
        self._url, self._inner, self._encoding, self._limit = response.url, response.stream, encoding, limit

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for piece in bounded_body(self._inner, self._encoding, self._limit):
                yield piece
        except HttpError as error:
            raise httpx2.StreamError(f"{self._url}: {error}") from error

    async def aclose(self) -> None:
        await self._inner.aclose()


def parts_of(blocks: Sequence[Any], shows_images: bool) -> list[Part]:
    """The texts, joined by newlines, and the images between them."""
    parts: list[Part] = []
    for block in blocks:
        if shows_images and isinstance(block, mcp_types.ImageContent):
            parts.append(image_part(block.data))
        elif parts and isinstance(parts[-1], str):
            parts[-1] += f"\n{_text(block)}"
        else:
            parts.append(_text(block))
    return parts


def _text(block: Any) -> str:
    if isinstance(block, mcp_types.TextContent):
        return block.text
    if isinstance(block, mcp_types.EmbeddedResource) and isinstance(block.resource, mcp_types.TextResourceContents):
        return block.resource.text
    return f"[{block.type} is not shown]"


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
