"""A server over stdio. As the SDK's ``stdio_client``, which puts no limit on the length of a message."""

import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import anyio
import mcp_types
from anyio.abc import Process
from mcp.client._transport import TransportStreams
from mcp.client.stdio import StdioServerParameters, get_default_environment
from mcp.shared.message import SessionMessage

Message = SessionMessage | Exception
EXIT_SECONDS = 2.0
"""Seconds for a server to exit after its stdin was closed, before it is killed."""
SKIPPED = 64 << 20
"""Bytes of a message that is too long which are read and forgotten, before the connection is closed."""
KEPT_ERRORS = 2000
"""Bytes of what a server writes to stderr that an error shows."""
_CLOSED = (anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream, OSError)
_ID = re.compile(rb'"id"\s*:\s*(?:(\d+)|"([^"\\]*)")')


@asynccontextmanager
async def bounded_stdio(server: StdioServerParameters, said: bytearray, limit: int) -> AsyncIterator[TransportStreams]:
    """Start a server and connect to it. The end of the context ends the server and what is in its process group.

    Args:
        server: its command.
        said: gets the end of what it writes to stderr.
        limit: bytes of a message; an answer that is longer is an error of its request.

    Raises:
        OSError: it cannot be started.
    """
    process = await anyio.open_process(
        [server.command, *server.args], env=get_default_environment() | (server.env or {}), cwd=server.cwd,
        start_new_session=True,
    )  # fmt: skip
    arrived, to_session = anyio.create_memory_object_stream[Message](0)
    from_session, leaving = anyio.create_memory_object_stream[SessionMessage](0)

    async def read() -> None:
        assert process.stdout is not None, "a pipe"
        lines = Lines(limit)
        async with arrived:
            with suppress(*_CLOSED):
                async for chunk in process.stdout:
                    for message in lines.messages(chunk):
                        await arrived.send(message)
                    if lines.is_endless:
                        return

    async def listen() -> None:
        assert process.stderr is not None, "a pipe"
        with suppress(*_CLOSED):
            async for chunk in process.stderr:
                said.extend(chunk)
                del said[:-KEPT_ERRORS]

    async def write() -> None:
        assert process.stdin is not None, "a pipe"
        async with leaving:
            with suppress(*_CLOSED):
                async for each in leaving:
                    text = each.message.model_dump_json(by_alias=True, exclude_unset=True)
                    await process.stdin.send(text.encode() + b"\n")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        tasks.start_soon(write)
        tasks.start_soon(listen)
        try:
            yield to_session, from_session
        finally:
            with anyio.CancelScope(shield=True):
                to_session.close()
                from_session.close()
                await _end(process)
            tasks.cancel_scope.cancel()


class Lines:
    """The messages in what a server writes, without keeping more than ``limit`` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._line = b""
        self._skipped = 0

    @property
    def is_endless(self) -> bool:
        """Whether a message is so long that nobody waits for its end."""
        return self._skipped > SKIPPED

    def messages(self, chunk: bytes) -> Iterator[Message]:
        """What the next bytes complete."""
        *ended, rest = chunk.split(b"\n")
        for part in ended:
            yield from self._add(part)
            if not self._skipped:
                yield _parsed(self._line)
            self._line, self._skipped = b"", 0
        yield from self._add(rest)

    def _add(self, part: bytes) -> Iterator[Message]:
        if self._skipped:
            self._skipped += len(part)
        elif len(self._line) + len(part) <= self._limit:
            self._line += part
        else:
            self._skipped = len(self._line) + len(part)
            yield self._too_long((self._line + part)[:200])
            self._line = b""

    def _too_long(self, beginning: bytes) -> Message:
        text = f"the message is longer than max_body_bytes={self._limit}. Raise this option if the server is right"
        if (found := _ID.search(beginning)) is None:
            return ValueError(text)
        request = int(found[1]) if found[1] else found[2].decode(errors="replace")
        error = mcp_types.ErrorData(code=mcp_types.INTERNAL_ERROR, message=text)
        return SessionMessage(mcp_types.JSONRPCError(jsonrpc="2.0", id=request, error=error))


def _parsed(line: bytes) -> Message:
    try:
        return SessionMessage(mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        return error


async def _end(process: Process) -> None:
    """Close its stdin, which tells it to exit, and kill what is left of its group."""
    if process.stdin is not None:
        with suppress(*_CLOSED):
            await process.stdin.aclose()
    # Not process.wait(): that also waits for whoever has inherited its stdout.
    with anyio.move_on_after(EXIT_SECONDS):
        while process.returncode is None:
            await anyio.sleep(0.01)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    while process.returncode is None:
        await anyio.sleep(0.01)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            with suppress(*_CLOSED):
                await pipe.aclose()
    # Whoever has inherited a pipe keeps asyncio's transport open, which then complains when it is collected.
    with suppress(AttributeError):
        process._process._transport.close()  # type: ignore[attr-defined]
