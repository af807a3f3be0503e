"""The server process: started, watched, and never left behind."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl_core.engine_kit.memory_files import SharedMemoryOf
from agentrl_engine_sglang import guard

LAST_LINES = 30


class ServerProcess:
    """A command in its own process group, whose output goes to a file.

    The group is killed by :meth:`kill`, or when the process that called :meth:`start` ends.

    Args:
        command: its words.
        environment: all of it.
        log_file: where the output is appended; empty for a temporary file, removed by :meth:`kill`.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log_file: str = "") -> None:
        self._command = list(command)
        self._environment = dict(environment)
        self._temporary = not log_file
        self.log_path = Path(log_file or tempfile.mkstemp(prefix="agentrl-sglang-", suffix=".log")[1])
        self._server: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._memory: SharedMemoryOf | None = None

    def start(self) -> None:
        """Raises OSError where the command cannot be run."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._start = log.tell()
            self._server = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended already
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=self._server.pid,
            )

    def is_ready(self) -> None:
        """All its processes run: what they share is removed with them."""
        if self._server is not None:
            self._memory = SharedMemoryOf([self._server.pid])

    @property
    def pid(self) -> int | None:
        """Of the server, which is its process group too."""
        return self._server.pid if self._server else None

    @property
    def exit_code(self) -> int | None:
        """None while the server runs; negative where a signal ended it."""
        return self._server.poll() if self._server else None

    async def ends_within(self, seconds: float) -> bool:
        """Wait for the server's end, at most so long."""
        if self._server is None:
            return True
        try:
            await asyncio.to_thread(self._server.wait, seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def last_lines(self) -> str:
        """The end of what this process has written."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(self._start)
                lines = log.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"(no log: {error})"
        return "\n".join(lines[-LAST_LINES:]) or "(it wrote nothing)"

    async def kill(self) -> None:
        """End the whole group, at once. May be called twice."""
        server, watcher = self._server, self._guard
        # While one of the two has not been waited for, no other group can have this number.
        if server is not None and (server.poll() is None or (watcher is not None and watcher.poll() is None)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            await asyncio.to_thread(server.wait)
        if watcher is not None and watcher.stdin is not None:
            watcher.stdin.close()
            await asyncio.to_thread(watcher.wait)
        self._guard = None
        if self._memory is not None:
            self._memory.close()
        if self._temporary:
            self.log_path.unlink(missing_ok=True)
