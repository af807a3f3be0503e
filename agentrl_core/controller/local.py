"""Worker groups in this process: one rank after the other, no Ray, exceptions and breakpoints as in any code."""

import inspect
from collections.abc import Sequence
from typing import Any

from agentrl_core.api.errors import WorkerError
from agentrl_core.controller.dispatch import Call
from agentrl_core.controller.event_loop import EventLoop
from agentrl_core.controller.worker import WorkerContext, worker_context
from agentrl_core.controller.worker_group import ClassWithInitArgs, Fetch, WorkerGroup
from agentrl_core.protocol import DataProto


class LocalWorkerGroup(WorkerGroup):
    """Workers as plain objects, in ``workers``, called in rank order.

    For one rank, or for several whose methods do no collective. A worker gets batches with containers of its own, as
    it would from another process. Async methods run to their end, on ``loop`` where one is given.
    """

    def __init__(
        self, cls_with_init: ClassWithInitArgs, world_size: int = 1, role: str = "", loop: EventLoop | None = None
    ) -> None:
        if world_size < 1:
            raise WorkerError(f"world_size is {world_size}, it must be at least 1")
        super().__init__(cls_with_init.cls, role or cls_with_init.cls.__name__, world_size)
        self._loop = loop or EventLoop()
        self._owns_loop = loop is None
        self.workers: list[Any] = []
        for rank in range(world_size):
            with worker_context(WorkerContext(rank, world_size, rank, world_size, use_gpu=True)):
                self.workers.append(cls_with_init())

    def _submit(self, method: str, calls: Sequence[Call | None]) -> list[Any]:
        if not self.workers:
            raise WorkerError(f"{self.role}.{method}: the worker group is closed")
        called = [(worker, call) for worker, call in zip(self.workers, calls, strict=True) if call is not None]
        return [self._run(worker, method, call) for worker, call in called]

    def _run(self, worker: Any, method: str, call: Call) -> Any:
        args, kwargs = call
        result = getattr(worker, method)(*map(_own, args), **{name: _own(value) for name, value in kwargs.items()})
        return self._loop.run(result) if inspect.iscoroutine(result) else result

    def _fetcher(self, method: str, ranks: Sequence[int]) -> Fetch:
        return list

    def close(self) -> None:
        """Closes the workers that have a ``close`` method, and forgets them."""
        workers, self.workers = self.workers, []
        for worker in workers:
            if callable(close := getattr(worker, "close", None)):
                close()
        if self._owns_loop and workers:
            self._loop.close()


def _own(value: Any) -> Any:
    return value.slice() if isinstance(value, DataProto) else value
