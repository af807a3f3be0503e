"""User code in child processes that can be killed.

A call that passes its deadline loses its process and nothing else. A few interchangeable processes serve a stateless
object, each with one call at a time. A stateful session has its own process.

A child is two processes: :mod:`~agentrl_core.hosting.supervisor` and the one with the code, which it has forked. Calls
go over a pair of sockets: unlike a pipe, nobody can open one through /proc.
"""

import asyncio
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import agentrl_core
from agentrl_core.api import Engines, ToolError, ToolUnavailableError
from agentrl_core.hosting.confinement import landlock_version
from agentrl_core.hosting.processes import kill_family
from agentrl_core.hosting.wire import HEADER, ID_BYTES, MAX_BYTES, read_answer
from agentrl_core.plugins.boundary import deadline

logger = logging.getLogger(__name__)
BUFFER_BYTES = 1 << 20
"""Of a socket in either direction: with the default, megabytes take a third longer."""
CLOSE_SECONDS = 5.0
"""Seconds for a child to end with everything that it started, before its supervisor is killed too."""
SAFE_VARIABLES = frozenset(
    "CUDA_VISIBLE_DEVICES HF_DATASETS_OFFLINE HF_HOME HF_HUB_OFFLINE HOME LANG LANGUAGE LD_LIBRARY_PATH LOGNAME "
    "MPLBACKEND OMP_NUM_THREADS PATH PYTHONHASHSEED PYTHONUNBUFFERED SHELL SSL_CERT_DIR SSL_CERT_FILE "
    "TERM TMPDIR TOKENIZERS_PARALLELISM TRANSFORMERS_OFFLINE TZ USER VIRTUAL_ENV".split()
)
"""Environment variables that every child gets, and those whose names begin with ``LC_``; none of them is a secret."""

# This process's agentrl, which need not be the installed one; the rest of the import path is the first message.
_CHILD = (
    f"import sys; sys.path.insert(0, {str(Path(agentrl_core.__file__).parents[1])!r}); "
    "from agentrl_core.hosting.supervisor import main; main()"
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
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._dying: list[subprocess.Popen[bytes]] = []
        self._one_call = asyncio.Lock()

    @property
    def alive(self) -> bool:
        """Whether the process runs, with the state that earlier calls left in it."""
        return self._process is not None and self._process.poll() is None

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float) -> Any:
        """Call a method of the object; an empty name calls the object itself. One call at a time, in order.

        Where no process runs, one is started first, within ``start_timeout``. Nothing else is waited for.

        Raises:
            DeadlineError: no answer within ``timeout`` seconds; the process was killed.
            RemoteCallError: the user's code raised.
            ToolUnavailableError: the user's code raised this.
            ToolError: the process died, or answered something else than this call.
        """
        async with self._one_call:
            if not self.alive:
                await self._start()
            return await self._exchange((method, args, kwargs), timeout)

    async def _start(self) -> None:
        self.kill()
        _warn_if_unconfined()
        ours, theirs = socket.socketpair()
        for each in (ours, theirs):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _CHILD], stdin=theirs.fileno(), start_new_session=True,
                    env={key: value for key, value in os.environ.items() if key in self._variables or key[:3] == "LC_"},
                )  # fmt: skip
            self._streams = await asyncio.open_unix_connection(sock=ours, limit=BUFFER_BYTES)
        except BaseException:
            ours.close()
            self.kill()
            raise
        try:
            self._send(sys.path, bytes(ID_BYTES))
            await self._exchange((self._build, self._args), self._start_timeout)
        except BaseException:
            self.kill()
            raise

    def _send(self, message: Any, request: bytes) -> None:
        assert self._streams is not None, "the process has been started"
        data = pickle.dumps(message, protocol=5)
        self._streams[1].write(HEADER.pack(len(data), request) + data)

    async def _exchange(self, message: Any, timeout: float) -> Any:
        assert self._process is not None and self._streams is not None, "the process has been started"
        process, (reader, writer) = self._process, self._streams
        done = False
        try:
            async with deadline(timeout, f"{self._name}: no answer within {timeout:g} s; its process was killed"):
                request = os.urandom(ID_BYTES)
                self._send(message, request)
                await writer.drain()
                size, answered = HEADER.unpack(await reader.readexactly(HEADER.size))
                if answered != request:
                    raise ValueError("it does not belong to the call that was made")
                if size > MAX_BYTES:
                    raise ToolError(f"{self._name}: its process was killed because it announced {size:,} bytes")
                status, *answer = read_answer(await reader.readexactly(size))
            done = True
        except (TypeError, ValueError) as error:
            raise ToolError(f"{self._name}: its process was killed because of a wrong answer: {error}") from error
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ToolError(f"{self._name}: its process died with exit code {await _exit_code(process)}") from None
        finally:
            # Also after a cancellation: an unread answer must not be taken for the answer to the next call.
            if not done:
                self.kill()
        if status == "ok":
            return answer[0]
        if answer[0] == ToolUnavailableError.__name__:
            raise ToolUnavailableError(answer[1])
        raise RemoteCallError(*answer)

    def kill(self) -> None:
        """Kill the process and everything that it started, without waiting. The next call starts a new one."""
        streams, self._streams = self._streams, None
        if streams is not None:
            # The supervisor sees it. Not only a close: a process that was forked here may hold the socket too.
            # On a copy, because the socket of uvloop, which Ray uses where it is installed, cannot be shut down.
            with suppress(OSError), socket.socket(fileno=os.dup(streams[1].get_extra_info("socket").fileno())) as copy:
                copy.shutdown(socket.SHUT_RDWR)
            streams[1].transport.abort()
        process, self._process = self._process, None
        self._dying = [each for each in self._dying if each.poll() is None]
        if process is None:
            return
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)  # a supervisor that was stopped has work to do
            self._dying.append(process)
        elif process.returncode < 0:
            # A supervisor that was killed left the others behind.
            kill_family(process.pid)

    async def close(self) -> None:
        """Kill the process and wait until it has exited, a few seconds at most."""
        self.kill()
        dying, self._dying = self._dying, []
        for process in dying:
            await asyncio.to_thread(_wait_for_end, process, self._name)


def _wait_for_end(process: "subprocess.Popen[bytes]", name: str) -> None:
    try:
        process.wait(CLOSE_SECONDS)
    except subprocess.TimeoutExpired:
        logger.warning("%s: its process %d did not end within %g s; killing it", name, process.pid, CLOSE_SECONDS)
        kill_family(process.pid)
        with suppress(subprocess.TimeoutExpired):
            process.wait(CLOSE_SECONDS)


@cache
def _warn_if_unconfined() -> None:
    if not landlock_version():
        logger.warning(
            "this kernel has no Landlock (Linux 5.19 or newer): tools and rewards in processes can read the "
            "environment and memory of this run's other processes, API keys included; see docs/security.md"
        )


async def _exit_code(process: "subprocess.Popen[bytes]") -> int | None:
    # It may have closed the socket without exiting.
    with suppress(subprocess.TimeoutExpired):
        await asyncio.to_thread(process.wait, 1.0)
    return process.returncode


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
            host.kill()
        for host in self._hosts:
            await host.close()
