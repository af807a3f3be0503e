"""User code in child processes that can be killed.

A call that passes its deadline loses its process and nothing else. A few interchangeable processes serve a stateless
object, each with one call at a time. A stateful session has its own process.
"""

import asyncio
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import agentrl_core
from agentrl_core.api import Engines, ToolError, ToolUnavailableError
from agentrl_core.hosting.processes import kill_family
from agentrl_core.hosting.wire import HEADER, MAX_BYTES, decode
from agentrl_core.plugins.boundary import deadline

SAFE_VARIABLES = frozenset(
    "CUDA_VISIBLE_DEVICES HF_DATASETS_OFFLINE HF_HOME HF_HUB_OFFLINE HOME LANG LANGUAGE LD_LIBRARY_PATH LOGNAME "
    "MPLBACKEND OMP_NUM_THREADS PATH PYTHONHASHSEED PYTHONUNBUFFERED SHELL SSL_CERT_DIR SSL_CERT_FILE "
    "TERM TMPDIR TOKENIZERS_PARALLELISM TRANSFORMERS_OFFLINE TZ USER VIRTUAL_ENV".split()
)
"""Environment variables that every child gets, and those whose names begin with ``LC_``; none of them is a secret."""

# This process's agentrl, which need not be the installed one; the rest of the import path is the first message.
_CHILD = (
    f"import sys; sys.path.insert(0, {str(Path(agentrl_core.__file__).parents[1])!r}); "
    "from agentrl_core.hosting.process_child import main; main()"
)


def engines_of_child(user: str, asked: Iterable[str]) -> Engines:
    """Return no clients, for code in a child process.

    Args:
        user: who runs there.
        asked: names of the engines that it looked up when it was built here.

    Raises:
        ConfigError: it looked one up; says why there is none.
    """
    reason = "it runs in a child process, which cannot reach engines; set `isolation: inline` in its slot"
    none = Engines(user=user, reason=reason)
    for name in asked:
        none[name]
    return none


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
        build: picklable function that creates the object; called in the child with ``args``.
        name: name of the object in messages.
        variables: names of environment variables that the child gets in addition to :data:`SAFE_VARIABLES`.
        start_timeout: seconds for the child to import and build.
    """

    def __init__(
        self,
        build: Callable[..., Any],
        args: tuple[Any, ...],
        name: str,
        variables: Sequence[str] = (),
        start_timeout: float = 60.0,
    ) -> None:
        self._build = build
        self._args = args
        self._name = name
        self._variables = SAFE_VARIABLES.union(variables)
        self._start_timeout = start_timeout
        self._process: asyncio.subprocess.Process | None = None
        self._dying: list[asyncio.subprocess.Process] = []
        self._one_call = asyncio.Lock()

    @property
    def alive(self) -> bool:
        """Whether the process runs, with the state that earlier calls left in it."""
        return self._process is not None and self._process.returncode is None

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float) -> Any:
        """Call a method of the object; an empty name calls the object itself. One call at a time, in order.

        Raises:
            DeadlineError: no answer within ``timeout`` seconds; the process was killed.
            RemoteCallError: the user's code raised.
            ToolUnavailableError: the user's code raised this.
            ToolError: the process died.
        """
        async with self._one_call:
            if not self.alive:
                await self._start()
            return await self._exchange((method, args, kwargs), timeout)

    async def _start(self) -> None:
        await self.close()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _CHILD,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
            env={name: value for name, value in os.environ.items() if name in self._variables or name[:3] == "LC_"},
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
            async with deadline(timeout, f"{self._name}: no answer within {timeout:g} s; its process was killed"):
                self._send(message)
                await process.stdin.drain()
                size = HEADER.unpack(await process.stdout.readexactly(HEADER.size))[0]
                if size > MAX_BYTES:
                    raise ToolError(f"{self._name}: its process was killed because it announced {size:,} bytes")
                status, *reply = decode(await process.stdout.readexactly(size))
            done = True
        except (TypeError, ValueError) as error:
            raise ToolError(f"{self._name}: its process was killed because of a wrong answer: {error}") from error
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ToolError(f"{self._name}: its process died with exit code {await _exit_code(process)}") from None
        finally:
            # Also after a cancellation: an unread answer must not be taken for the answer to the next call.
            if not done:
                self.kill()
        if status == "error":
            if reply[0] == ToolUnavailableError.__name__:
                raise ToolUnavailableError(str(reply[1]))
            raise RemoteCallError(*map(str, reply))
        return reply[0]

    def kill(self) -> None:
        """Kill the process and everything that it started. The next call starts a new one."""
        process, self._process = self._process, None
        if process is not None:
            self._dying.append(process)
            kill_family(process.pid)

    async def close(self) -> None:
        """Kill the process and wait until it has exited, so that nothing of it outlives the event loop."""
        self.kill()
        while self._dying:
            await self._dying[-1].wait()
            self._dying.pop()


async def _exit_code(process: asyncio.subprocess.Process) -> int:
    try:
        async with asyncio.timeout(1.0):
            return await process.wait()
    except TimeoutError:
        # It closed the pipe without exiting.
        process.kill()
        return await process.wait()


class ProcessPool:
    """A few interchangeable processes, each with one call at a time, started when they are first needed."""

    def __init__(self, make: Callable[[], ProcessHost], size: int) -> None:
        self._hosts = [make() for _ in range(size)]
        self._free = list(self._hosts)
        self._slots = asyncio.Semaphore(size)

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float) -> Any:
        """As :meth:`ProcessHost.call`, in a free process. Waiting for one does not count towards ``timeout``."""
        async with self._slots:
            host = self._free.pop()
            try:
                return await host.call(method, args, kwargs, timeout)
            finally:
                self._free.append(host)

    async def close(self) -> None:
        """Stop all processes."""
        for host in self._hosts:
            await host.close()
