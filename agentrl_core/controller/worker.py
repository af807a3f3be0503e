"""`Worker`: the base of everything that runs on the ranks of a worker group."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Self

import torch


@dataclass(frozen=True)
class WorkerContext:
    """Where a worker stands among the ranks of its group."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    use_gpu: bool = False


_ALONE = WorkerContext()
_current: ContextVar[WorkerContext] = ContextVar("agentrl_worker_context", default=_ALONE)


@contextmanager
def worker_context(context: WorkerContext) -> Iterator[None]:
    """Workers that are made in this block stand where ``context`` says."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


class Worker:
    """Base class of workers. Made outside a group it is rank 0 of 1, so it can be tried out like any object."""

    _context: WorkerContext

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # In __new__, so that a subclass that does not call super().__init__() has its rank too.
        worker = super().__new__(cls)
        worker._context = _current.get()
        return worker

    @property
    def rank(self) -> int:
        """0 … world_size - 1."""
        return self._context.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the group."""
        return self._context.world_size

    @property
    def local_rank(self) -> int:
        """The rank among those on the same node."""
        return self._context.local_rank

    @property
    def local_world_size(self) -> int:
        """The number of ranks on the same node."""
        return self._context.local_world_size

    @property
    def master_addr(self) -> str:
        """The address of rank 0's node, for ``torch.distributed``."""
        return self._context.master_addr

    @property
    def master_port(self) -> int:
        """A port that was free on rank 0's node when the group was made; 0 in a group of one process."""
        return self._context.master_port

    @property
    def was_given_gpu(self) -> bool:
        """The runtime has reserved a GPU for this rank; in one process all ranks only see what is there."""
        return self._context.use_gpu and self.master_port > 0

    @property
    def device(self) -> torch.device:
        """The device of this rank: its own CUDA device where the group has GPUs, otherwise the CPU."""
        if not self._context.use_gpu or not torch.cuda.is_available():
            return torch.device("cpu")
        # On Ray each process sees only its own devices.
        return torch.device("cuda", self.local_rank if torch.cuda.device_count() > self.local_rank else 0)
