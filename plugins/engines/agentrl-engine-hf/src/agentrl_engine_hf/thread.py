"""The one thread that computes: commands between steps, steps while there is work."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from agentrl_core.api.errors import EngineError
from agentrl_engine_hf.executor import Executor

T = TypeVar("T")

_GATHER_SECONDS = 0.001
_GATHER_LIMIT_SECONDS = 0.01
"""Requests that arrive together are admitted together: an idle engine waits for so long a silence before it starts."""


class EngineThread:
    """Runs commands in the order in which they were posted, never in the middle of a step.

    ``make_executor`` runs in the thread, too; its error is raised by :attr:`started`.
    """

    def __init__(self, make_executor: Callable[[], Executor], name: str) -> None:
        self.started: Future[None] = Future()
        self.error: BaseException | None = None
        self._make_executor = make_executor
        self._commands: queue.SimpleQueue[Callable[[Executor], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._accepting = True
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, command: Callable[[Executor], None]) -> None:
        """Run ``command`` between two steps. Raises EngineError if the thread has ended."""
        with self._lock:
            if not self._accepting:
                raise EngineError("the hf engine has stopped") from self.error
            self._commands.put(command)

    def call(self, command: Callable[[Executor], T]) -> "Future[T]":
        """Like :meth:`post`, with a result."""
        future: Future[T] = Future()

        def run(executor: Executor) -> None:
            try:
                result = command(executor)
            except BaseException as error:  # noqa: BLE001 - it is raised where the caller waits
                future.set_exception(error)
                if not isinstance(error, Exception):
                    raise
                return
            executor.settle()
            future.set_result(result)

        future.set_running_or_notify_cancel()
        self.post(run)
        return future

    def stop(self) -> None:
        """End after the current step; requests that still run fail with EngineError."""
        with self._lock:
            if not self._accepting:
                return
            self._accepting = False
            self._commands.put(None)

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        self.started.set_running_or_notify_cancel()
        try:
            executor = self._make_executor()
        except BaseException as error:  # noqa: BLE001 - start() raises it
            self._refuse(error)
            self.started.set_exception(error)
            return
        self.started.set_result(None)
        try:
            self._serve(executor)
            self._refuse(None)
        except BaseException as error:  # noqa: BLE001 - a dead thread must leave nobody waiting
            self._refuse(error)
        self._finish(executor)

    def _finish(self, executor: Executor) -> None:
        """Commands that came too late still run, because their callers wait for an answer; requests fail."""
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command(executor)
        executor.fail_all(self.error or EngineError("the hf engine was closed"))

    def _refuse(self, error: BaseException | None) -> None:
        with self._lock:
            self._accepting = False
            self.error = error

    def _serve(self, executor: Executor) -> None:
        while True:
            if not executor.ready:
                command = self._commands.get()
                if command is None:
                    return
                command(executor)
                executor.settle()
            if not self._drain(executor, gather=executor.ready and not executor.running):
                return
            if executor.ready:
                executor.step()

    def _drain(self, executor: Executor, gather: bool) -> bool:
        """Run the commands that are there; False when asked to stop."""
        limit = time.monotonic() + _GATHER_LIMIT_SECONDS
        while True:
            try:
                if gather and time.monotonic() < limit:
                    command = self._commands.get(timeout=_GATHER_SECONDS)
                else:
                    command = self._commands.get_nowait()
            except queue.Empty:
                return True
            if command is None:
                return False
            command(executor)
            executor.settle()
