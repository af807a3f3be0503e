"""The ranks that train one model together, and the few sums that they agree on.

Every rank knows how many tokens each row of a batch has, and takes its share of the rows of each mini-batch, so
denominators and the order of rows are known everywhere without a word; gradients and metrics are summed over the ranks.
"""

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from agentrl_core.api.errors import AgentRLError, WorkerError
from agentrl_core.api.training_backend import DataShare
from agentrl_core.controller import Worker
from agentrl_core.controller.dispatch import Call, DispatchMode, Plan, Ranks

T = TypeVar("T")
JOIN_TIMEOUT = timedelta(minutes=10)
COLLECTIVE_TIMEOUT = timedelta(hours=2)
"""A rank may wait for another that loads a large model or writes a checkpoint; one that died or is frozen is noticed
sooner, by whoever started it."""


def _plan_collective(group: Ranks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    calls: list[Call | None] = [(args, kwargs)] * group.world_size
    return Plan(calls, [0], lambda results: results[0])


COLLECTIVE = DispatchMode("COLLECTIVE", _plan_collective)
"""Every rank gets the same arguments and must take part; the result is that of rank 0."""


class TrainingRanks:
    """A rank's place among ``size`` ranks. Made with :meth:`join`; alone (``size`` 1) everything is a plain call.

    ``share`` is what this rank computes of each batch. As it stands it is another part for every rank.
    """

    def __init__(self, rank: int = 0, size: int = 1, owns_group: bool = False) -> None:
        self.rank = rank
        self.size = size
        self.share = DataShare(rank, size)
        self._owns_group = owns_group

    @classmethod
    def join(cls, worker: Worker, device: torch.device) -> "TrainingRanks":
        """Meet the other ranks of the worker's group; a group of one process meets nobody.

        Workers that share a process share its process group, gloo for tensors of the host and NCCL for those of CUDA.

        Raises WorkerError where the ranks do not find each other, or share one process.
        """
        if worker.world_size == 1:
            return cls()
        if not worker.master_port:
            raise WorkerError(
                f"{type(worker).__name__} has {worker.world_size} ranks in one process, which cannot train together: "
                "set cluster.runtime=ray, or give the group one rank"
            )
        if device.type == "cuda":
            torch.cuda.set_device(worker.device)
        owns_group = not dist.is_initialized()
        if owns_group:
            address = f"tcp://{worker.master_addr}:{worker.master_port}"
            try:
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                    init_method=address,
                    rank=worker.rank,
                    world_size=worker.world_size,
                    timeout=JOIN_TIMEOUT,
                )
            except (RuntimeError, ValueError) as error:
                raise WorkerError(
                    f"rank {worker.rank} of {worker.world_size} cannot reach the others at {address}: {error}; the "
                    "nodes must reach each other by TCP (GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the interface)"
                ) from error
            _set_pg_timeout(COLLECTIVE_TIMEOUT)
        return cls(worker.rank, worker.world_size, owns_group)

    @property
    def is_first(self) -> bool:
        """This is rank 0, which writes files and keeps what is gathered."""
        return self.rank == 0

    def another_group(self) -> dist.ProcessGroup | None:
        """A group of the same ranks for another thread, on the host; None for a single rank. All ranks must call this.

        Collectives of two threads in one group would meet those of the other thread.
        """
        return None if self.size == 1 else dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)

    def largest(self, value: int) -> int:
        """The largest of the ranks' values."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)

    def summed(self, values: Mapping[str, float]) -> dict[str, float]:
        """The values of ranks that count added up, key by key; each of these must have the same keys."""
        if self.size == 1:
            return dict(values)
        if self.share.count < self.size:
            # Ranks that do not count may not know the keys.
            gathered: list[dict[str, float] | None] = [None] * self.size
            dist.all_gather_object(gathered, dict(values) if self.share.counts else None)
            counted = [each for each in gathered if each is not None]
            return {key: sum(each[key] for each in counted) for key in counted[0]}
        keys = sorted(values)
        if not keys:
            return {}
        tensor = torch.tensor([values[key] for key in keys], dtype=torch.float64)
        dist.all_reduce(tensor)
        return dict(zip(keys, tensor.tolist(), strict=True))

    def summed_rows(self, values: torch.Tensor) -> torch.Tensor:
        """A tensor of the host, added up over the ranks that count."""
        if self.size > 1:
            dist.all_reduce(values if self.share.counts else values.zero_())
        return values

    def first_problem(self, problem: str | None) -> str | None:
        """What the lowest rank with a problem says, on all ranks; None where no rank has one."""
        if not self.largest(int(problem is not None)):
            return None
        if self.size == 1:
            return problem
        told: list[str | None] = [None] * self.size
        dist.all_gather_object(told, problem)
        return next(f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None)

    def on_first(self, function: Callable[[], T]) -> T | None:
        """Run ``function`` on rank 0 only; the others get None.

        Its error is raised on every rank, so that nobody waits for a rank that has given up.
        """
        if self.size == 1:
            return function()
        result, failure = None, None
        if self.is_first:
            try:
                result = function()
            except AgentRLError as error:
                failure = error
        outcome: list[AgentRLError | None] = [failure]
        dist.broadcast_object_list(outcome, src=0)
        if outcome[0] is not None:
            raise outcome[0]
        return result

    def close(self) -> None:
        """Leave the process group, if this joined it."""
        if self._owns_group and dist.is_initialized():
            self._owns_group = False
            dist.destroy_process_group()
