"""Sandboxes as agentrl sees them: started, asked, stopped."""

import asyncio
import json
import logging
import os
import subprocess
import tempfile
from contextlib import suppress
from typing import Any

from agentrl_core.api import ToolContext, ToolUnavailableError
from agentrl_tools_sandbox.boundary import Launch, choose
from agentrl_tools_sandbox.config import SandboxConfig
from agentrl_tools_sandbox.launch import delete

logger = logging.getLogger(__name__)
GRACE = 2.0
"""Seconds beyond the time limit of the code after which the whole sandbox is stopped."""
STOP = 5.0
"""Seconds for a sandbox to stop by itself."""
_chosen: dict[str, Launch] = {}


class SandboxDied(Exception):
    """The sandbox ended during a call, or was stopped because the call did not end."""


class Sandbox:
    """One sandbox with the guest program in it.

    Args:
        launch: how to start it.
        max_output: bytes of output that a reply may hold.
    """

    def __init__(self, launch: Launch, max_output: int) -> None:
        self._launch = launch
        self._max_output = max_output
        # JSON writes a byte of text as six characters at most.
        self._limit = 6 * max_output + 65536
        self._folder = ""
        self._lifeline = -1
        self._process: asyncio.subprocess.Process | None = None
        self._one_request = asyncio.Lock()

    async def start(self) -> None:
        """Start it, and wait until the guest program is ready.

        Raises:
            ToolUnavailableError: it ended at once; the message holds what it wrote.
        """
        self._folder = tempfile.mkdtemp(prefix="agentrl-sandbox-")
        reading, self._lifeline = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._launch.command(self._folder, reading),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                limit=self._limit, env={"PATH": os.environ.get("PATH", os.defpath)}, pass_fds=(reading,),
                start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(reading)
        assert self._process.stdout is not None and self._process.stderr is not None
        if not await self._process.stdout.readline():
            errors = await self._process.stderr.read(4096)
            raise ToolUnavailableError(f"the sandbox ({self._launch.boundary}) did not start: {_last_line(errors)}")

    async def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Send a request and wait for its reply; one at a time.

        Raises:
            SandboxDied: the reason, for the model. The sandbox cannot be used any more.
        """
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None, "started"
        async with self._one_request:
            try:
                async with asyncio.timeout(timeout + GRACE):
                    process.stdin.write(json.dumps(request).encode() + b"\n")
                    await process.stdin.drain()
                    line = await process.stdout.readline()
                reply: Any = json.loads(line) if line else None
            except TimeoutError:
                raise SandboxDied(f"it ran for more than {timeout:g} s and was stopped") from None
            except (ConnectionError, ValueError, RecursionError):
                reply = None
        if not isinstance(reply, dict) or not isinstance(reply.get("text", reply.get("error")), str):
            raise SandboxDied("its process ended: it exited, crashed, or exceeded a limit of memory or disk space")
        # The guest cuts longer ones, at the end of a line or a block, unless code has taken its place.
        most = self._max_output + 8192
        return {key: value[:most] if isinstance(value, str) else value for key, value in reply.items()}

    async def close(self) -> None:
        """Stop it with everything that it started, and delete its files."""
        if self._lifeline >= 0:
            # Also a byte: a process that was forked from this one may hold the pipe open.
            with suppress(OSError):
                os.write(self._lifeline, b".")
            os.close(self._lifeline)
            self._lifeline = -1
        if (process := self._process) is not None:
            # Closing stdin alone ends a guest that waits for a request.
            transport = process._transport  # type: ignore[attr-defined]
            # asyncio does not see the end of a process that left more behind than anybody has read.
            for number in (1, 2):
                transport.get_pipe_transport(number).close()
            try:
                async with asyncio.timeout(STOP):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
            transport.close()
            self._process = None
        if self._folder:
            await asyncio.to_thread(delete, self._folder)
            self._folder = ""


class Sandboxes:
    """Starts the sandboxes of a tool, a few at a time.

    Args:
        config: its options.
        context: names the tool in messages.

    Raises:
        PluginRequirementError: no boundary works here, and ``unsafe`` is not set.
    """

    def __init__(self, config: SandboxConfig, context: ToolContext) -> None:
        self.config = config
        key = repr(config)
        if key not in _chosen:
            _chosen[key] = choose(config, trial)
            if config.unsafe:
                logger.warning("tool %r runs code without a boundary, because `unsafe` is set", context.name)
        self.launch = _chosen[key]
        self._starting = asyncio.Semaphore(config.max_starting)
        self._open: dict[str, Sandbox] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def start(self) -> Sandbox:
        """A new sandbox.

        Raises:
            ToolUnavailableError: it did not start, or not in time.
        """
        sandbox = Sandbox(self.launch, self.config.max_output)
        try:
            async with asyncio.timeout(self.config.start_timeout), self._starting:
                await sandbox.start()
        except BaseException as error:
            await asyncio.shield(sandbox.close())
            if isinstance(error, TimeoutError):
                limit = f"start_timeout of {self.config.start_timeout:g} s"
                raise ToolUnavailableError(f"no sandbox started within the {limit}") from None
            if isinstance(error, OSError):
                raise ToolUnavailableError(f"the sandbox did not start: {error}") from error
            raise
        return sandbox

    async def ask(self, instance_id: str, request: dict[str, Any], keep: bool) -> dict[str, Any]:
        """Ask a trajectory's sandbox, or with ``keep=False`` one that is started for this request only.

        Raises:
            SandboxDied: the reason. The next request gets a new sandbox.
            ToolUnavailableError: it did not start.
        """
        if not keep:
            sandbox = await self.start()
            try:
                return await sandbox.ask(request, self.config.timeout)
            finally:
                await asyncio.shield(sandbox.close())
        async with self._locks.setdefault(instance_id, asyncio.Lock()):
            if instance_id not in self._open:
                self._open[instance_id] = await self.start()
            sandbox, answered = self._open[instance_id], False
            try:
                reply = await sandbox.ask(request, self.config.timeout)
                answered = True
                return reply
            finally:
                # Also after a cancellation: a reply that nobody read must not answer the next request.
                if not answered:
                    del self._open[instance_id]
                    await asyncio.shield(sandbox.close())

    async def release(self, instance_id: str) -> None:
        """Stop the sandbox of a trajectory."""
        self._locks.pop(instance_id, None)
        if sandbox := self._open.pop(instance_id, None):
            await sandbox.close()


def trial(launch: Launch) -> str:
    """Start a sandbox and end it; returns why that failed, or ""."""
    folder = tempfile.mkdtemp(prefix="agentrl-sandbox-")
    reading, writing = os.pipe()
    try:
        done = subprocess.run(
            launch.command(folder, reading), stdin=subprocess.DEVNULL, capture_output=True, timeout=30,
            env={"PATH": os.environ.get("PATH", os.defpath)}, pass_fds=(reading,), start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "a trial did not end within 30 s"
    finally:
        os.close(reading)
        os.close(writing)
        delete(folder)
    return "" if b"ready" in done.stdout else f"a trial failed: {_last_line(done.stderr)}"


def _last_line(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
