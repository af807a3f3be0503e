"""Weights broadcast to the processes of engines, which may be on other hosts: the road where no file can be mapped.

Rank 0 sends, the others receive; they meet in a store on rank 0's host. It needs torch in both interpreters, and with
NCCL a device of its own for each rank, rank 0 too. Nothing of torch's default process group is touched.

    with WeightGroup(address, 0, 3) as group:                # the sender
        group.send(bucket)
    with WeightGroup(address, rank, 3) as group:             # a receiver
        for name, tensor in group.receive(names, shapes, dtypes): ...
"""

import ipaddress
import math
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

from agentrl_core.api.errors import EngineError
from agentrl_core.api.weights import DTYPE_BYTES, ArrayBucket
from agentrl_core.engine_kit.ports import host_address

if TYPE_CHECKING:
    import torch

TIMEOUT = 600.0
"""Seconds that ranks wait for each other."""


class WeightGroup:
    """One rank of a group. Blocks until all ranks have come.

    Args:
        address: ``host:port`` of the store, which rank 0 opens there.
        rank: of this process; 0 sends.
        size: of the group.
        backend: ``gloo`` for tensors on the host, ``nccl`` for those on CUDA devices.
        device: on which a receiver wants what it gets: the CPU with gloo.
        timeout: [seconds] to wait for the others, when joining and in each transfer.

    Raises:
        EngineError: the others have not come in time.
    """

    def __init__(
        self,
        address: str,
        rank: int,
        size: int,
        backend: str = "gloo",
        device: "torch.device | str" = "cpu",
        timeout: float = TIMEOUT,
    ) -> None:
        import torch

        self._device = device
        host, _, port = address.rpartition(":")
        limit = timedelta(seconds=timeout)
        try:
            # The store lives as long as this reference to it.
            self._store: Any = torch.distributed.TCPStore(  # type: ignore[attr-defined]
                host, int(port), size, rank == 0, limit
            )
            self._group: Any = (_gloo if backend == "gloo" else _nccl)(host, self._store, rank, size, limit)
        except RuntimeError as error:
            raise EngineError(
                f"rank {rank} of the {size} that weights are to be sent in could not join the others at {address} "
                f"within {timeout:g} s; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the network interface: {error}"
            ) from error

    def send(self, bucket: ArrayBucket) -> None:
        """Send a bucket from the host's memory; only with gloo."""
        import torch

        # A copy where it is read-only: torch has no such tensors.
        data = bucket.data if bucket.data.flags.writeable else bucket.data.copy()
        self.broadcast(torch.from_numpy(data))

    def receive(
        self, names: Sequence[str], shapes: Sequence[Sequence[int]], dtypes: Sequence[str]
    ) -> "Iterator[tuple[str, torch.Tensor]]":
        """The tensors of the bucket that rank 0 sends next; they share memory."""
        import torch

        received = torch.empty(total_bytes(shapes, dtypes), dtype=torch.uint8, device=self._device)
        self.broadcast(received)
        yield from cut(received, names, shapes, dtypes)

    def broadcast(self, tensor: "torch.Tensor") -> None:
        """Rank 0's tensor into everybody's; contiguous, of the same number of bytes."""
        import torch

        if tensor.numel():
            self._group.broadcast(tensor, 0).wait()
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)

    def close(self) -> None:
        """Leave. A second call does nothing."""
        self._group = self._store = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def total_bytes(shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> int:
    """Of a bucket."""
    return sum(math.prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in zip(shapes, dtypes, strict=True))


def cut(
    received: "torch.Tensor", names: Sequence[str], shapes: Sequence[Sequence[int]], dtypes: Sequence[str]
) -> "Iterator[tuple[str, torch.Tensor]]":
    """The tensors of a bucket whose bytes [n] uint8 have come; they share its memory where they can."""
    import torch

    sizes = [math.prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in zip(shapes, dtypes, strict=True)]
    for name, shape, dtype, part in zip(names, shapes, dtypes, torch.split(received, sizes), strict=True):
        # Bytes can be looked at as elements only where they begin at a multiple of an element's size.
        aligned = part if part.storage_offset() % DTYPE_BYTES[dtype] == 0 else part.clone()
        yield name, aligned.view(getattr(torch, dtype)).view(tuple(shape))


def _gloo(host: str, store: Any, rank: int, size: int, limit: timedelta) -> Any:
    import torch

    gloo: Any = torch.distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = limit
    if not os.environ.get("GLOO_SOCKET_IFNAME"):
        # By itself it takes the address of the host's name, which is often the loopback's.
        here = host if ipaddress.ip_address(host).is_loopback else host_address()
        options._devices = [gloo.create_device(hostname=here)]
    else:
        options._devices = [gloo.create_default_device()]
    return gloo(store, rank, size, options)


def _nccl(host: str, store: Any, rank: int, size: int, limit: timedelta) -> Any:
    import torch

    options = torch.distributed.ProcessGroupNCCL.Options()
    options._timeout = limit
    return torch.distributed.ProcessGroupNCCL(store, rank, size, options)
