"""User code in child processes that can be killed.

A call that passes its deadline costs its own process and nothing else. A stateless object is served by a few
interchangeable processes, one call at a time each; a stateful session owns its process.
"""

import asyncio
import pickle
import sys
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

from agentrl_core.api import DeadlineError, ToolError
from agentrl_core.hosting.process_child import HEADER


class RemoteCallError(ToolError):
    """User code raised in its process; ``trace`` is the traceback there."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(f"{kind}: {message}" if message else kind)
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        kind, _, message = str(self).partition(": ")
        return type(self), (kind, message, self.trace)


class ProcessHost:
    """One child process around one object.

    Args:
        build: picklable function that makes the object, called in the child with ``args``.
        name: for messages.
        start_timeout: seconds for the child to import and build.
    """

    def __init__(
        self, build: Callable[..., Any], args: tuple[Any, ...], name: str, start_timeout: float = 60.0
    ) -> None:
        self._build = build
        self._args = args
        self._name = name
        self._start_timeout = start_timeout
        self._process: asyncio.subprocess.Process | None = None
        self._dying: list[asyncio.subprocess.Process] = []
        self._one_call = asyncio.Lock()

    @property
    def alive(self) -> bool:
        """The process runs, with all that earlier calls left in it."""
        return self._process is not None and self._process.returncode is None

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float) -> Any:
        """Call a method of the object; an empty name calls the object itself. One call at a time, in order.

        Raises:
            DeadlineError: no answer within ``timeout`` seconds; the process was killed.
            RemoteCallError: the user's code raised.
            ToolError: the process died.
        """
        async with self._one_call:
            if not self.alive:
                await self._start()
            return await self._exchange((method, args, kwargs), timeout)

    async def _start(self) -> None:
        await self.close()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "agentrl_core.hosting.process_child",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            self._send(sys.path)
            await self._exchange((self._build, self._args), self._start_timeout)
        except BaseException:
            self.kill()
            raise

    def _send(self, message: Any) -> None:
        assert self._process is not None and self._process.stdin is not None, "the process has been started"
        data = pickle.dumps(message, protocol=5)
        self._process.stdin.write(HEADER.pack(len(data)) + data)

    async def _exchange(self, message: Any, timeout: float) -> Any:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None, "started"
        done = False
        try:
            async with asyncio.timeout(timeout):
                self._send(message)
                await process.stdin.drain()
                size = HEADER.unpack(await process.stdout.readexactly(HEADER.size))[0]
                reply = pickle.loads(await process.stdout.readexactly(size))
            done = True
        except TimeoutError:
            raise DeadlineError(f"{self._name}: no answer within {timeout:g} s; its process was killed") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ToolError(f"{self._name}: its process died with exit code {await _exit_code(process)}") from None
        finally:
            # Also after a cancellation: an answer that nobody read must not meet the next question.
            if not done:
                self.kill()
        if reply[0] == "error":
            raise RemoteCallError(*reply[1:])
        return reply[1]

    def kill(self) -> None:
        """End the process, at once; the next call starts a new one."""
        process, self._process = self._process, None
        if process is not None:
            self._dying.append(process)
            if process.returncode is None:
                process.kill()

    async def close(self) -> None:
        """End the process and wait until it has gone, so that nothing of it outlives the event loop."""
        self.kill()
        while self._dying:
            await self._dying[-1].wait()
            self._dying.pop()


async def _exit_code(process: asyncio.subprocess.Process) -> int:
    try:
        async with asyncio.timeout(1.0):
            return await process.wait()
    except TimeoutError:
        # It closed the pipe and lives on.
        process.kill()
        return await process.wait()


class ProcessPool:
    """A few interchangeable processes, one call at a time each, started when first needed."""

    def __init__(self, make: Callable[[], ProcessHost], size: int) -> None:
        self._hosts = [make() for _ in range(size)]
        self._free = list(self._hosts)
        self._slots = asyncio.Semaphore(size)

    @asynccontextmanager
    async def borrow(self) -> Any:
        """A free process; waits for one. Give the deadline to the call, so that waiting does not count."""
        async with self._slots:
            host = self._free.pop()
            try:
                yield host
            finally:
                self._free.append(host)

    async def close(self) -> None:
        """End all processes."""
        for host in self._hosts:
            await host.close()
