"""Weights sent from the actor's device to those of the engines, bucket by bucket, as flat bytes.

    with WeightGroup(address, 0, 3) as group:                # the actor
        group.broadcast(tensor)
    with join_as_engine(broadcast, rank, device) as group:   # a process of an engine
        for name, tensor in group.receive(bucket): ...

With ``gloo`` and ``nccl`` rank 0 sends and the others receive, on any host; NCCL needs a device for each rank. With
``ipc`` each rank of the actor fills a buffer on its device, and the engines' ranks on that device copy it (CUDA IPC; on
the CPU a file in memory plays the part of the device's). The group then carries only handles of buffers, by gloo.

Ranks meet in a ``TCPStore`` on the host of the actor's rank 0. It has no authentication: whoever reaches the port can
read and write it. On one machine it listens on the loopback address only.
"""

import ast
import ipaddress
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

from agentrl_core.api.errors import EngineError
from agentrl_core.api.weights import DTYPE_BYTES, ArrayBucket, Broadcast
from agentrl_core.engine_kit.memory_files import MemoryFolder
from agentrl_core.engine_kit.ports import host_address, named_interface

if TYPE_CHECKING:
    import torch

TIMEOUT = 600.0
"""Seconds that ranks wait for each other."""
GROUP_NAME = "agentrl"
"""Of the group in ``torch.distributed``, for engines that join it with their own functions."""
_HANDLE_BYTES = 4096

Tensors = Iterator[tuple[str, "torch.Tensor"]]


class WeightGroup:
    """One rank of a group. Blocks until all ranks have come.

    Args:
        address: ``host:port`` of the store, which rank 0 opens there.
        rank: of this process; the actor's come first.
        size: of the group.
        backend: see :class:`agentrl_core.api.weights.Broadcast`.
        device: of this process; the CPU with gloo.
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

        self._device, self._size, self._uses_buffers = torch.device(device), size, backend == "ipc"
        # Where the bytes are with ipc, and the text by which other processes find them.
        self._buffer: torch.Tensor | None = None
        self._handle = ""
        # Where the buffer's file is, on the CPU.
        self._folder: MemoryFolder | None = None
        try:
            self._group: Any = _process_group(backend, address, rank, size, timedelta(seconds=timeout))
        except (RuntimeError, OSError) as error:
            raise EngineError(
                f"rank {rank} of the {size} that weights are to be sent in could not join the others at {address} "
                f"within {timeout:g} s; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the network interface: {error}"
            ) from error

    def broadcast(self, tensor: "torch.Tensor") -> None:
        """Send the bytes [n] uint8 of a contiguous tensor. Returns when the receivers have them."""
        if not self._uses_buffers:
            self._share(tensor)
            return
        if self._buffer is None or self._buffer.numel() < tensor.numel():
            self._allocate(tensor.numel())
        assert self._buffer is not None
        self._buffer[: tensor.numel()].copy_(tensor)
        _settle(self._device)
        self._exchange(self._handle)
        self._group.barrier().wait()

    def receive(self, bucket: ArrayBucket) -> Tensors:
        """The tensors of the bucket that is sent next, in its layout; they may share memory."""
        import torch

        if self._uses_buffers:
            received = self._copied(bucket.nbytes)
        else:
            received = torch.empty(bucket.nbytes, dtype=torch.uint8, device=self._device)
            self._share(received)
        parts = torch.split(received, bucket.sizes)
        for name, shape, dtype, part in zip(bucket.names, bucket.shapes, bucket.dtypes, parts, strict=True):
            # Bytes can be viewed as elements only where they begin at a multiple of an element's size.
            aligned = part if part.storage_offset() % DTYPE_BYTES[dtype] == 0 else part.clone()
            yield name, aligned.view(getattr(torch, dtype)).view(tuple(shape))

    def _share(self, tensor: "torch.Tensor") -> None:
        if tensor.numel():
            self._group.broadcast(tensor, 0).wait()
        _settle(tensor.device)

    def _copied(self, nbytes: int) -> "torch.Tensor":
        """A copy of what is in the buffer on this device: the actor fills it again."""
        here = _name_of(self._device)
        # Of several actors on one device, as on the CPU, the first one's weights are taken.
        handle = next((each for each in self._exchange("") if each.startswith(here)), "")
        if not handle:
            raise EngineError(f"weights by CUDA IPC: no process of the actor computes on {here}, as this engine does")
        if self._buffer is None or handle != self._handle:
            self._handle, self._buffer = handle, _opened(handle.removeprefix(here), self._device)
        copy = self._buffer[:nbytes].clone()
        _settle(self._device)
        self._group.barrier().wait()
        return copy

    def _allocate(self, nbytes: int) -> None:
        """A buffer [nbytes] uint8, and its handle: the device's name, then a tuple in Python's notation."""
        import torch

        if self._device.type == "cuda":
            self._buffer = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=self._device)
            storage: Any = self._buffer.untyped_storage()
            parts = storage._share_cuda_()
        else:
            # torch's own shared files stay until the last process that has opened them ends.
            self._remove_file()
            self._folder = MemoryFolder("buffer", nbytes)
            parts = str(self._folder.path / "buffer"), max(nbytes, 1)
            self._buffer = torch.from_file(parts[0], shared=True, size=parts[1], dtype=torch.uint8)
        self._handle = _name_of(self._device) + repr(parts)

    def _exchange(self, handle: str) -> list[str]:
        """Every rank's handle. Returns when all ranks have called this."""
        import torch

        raw = handle.encode()
        if len(raw) > _HANDLE_BYTES:
            raise EngineError(
                f"weights by CUDA IPC: the handle of a buffer on {self._device} has {len(raw)} bytes, and at most "
                f"{_HANDLE_BYTES} can be sent. On a CPU it names a file: set TMPDIR to a shorter path"
            )
        mine = torch.tensor([*raw.ljust(_HANDLE_BYTES)], dtype=torch.uint8)
        everybodys = [torch.empty_like(mine) for _ in range(self._size)]
        self._group.allgather([everybodys], [mine]).wait()
        return [bytes(each.tolist()).decode().rstrip() for each in everybodys]

    def close(self) -> None:
        """Leave. A second call does nothing."""
        self._group = self._buffer = None
        self._remove_file()

    def _remove_file(self) -> None:
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def join_as_engine(broadcast: Broadcast, rank: int, device: "torch.device") -> WeightGroup:
    """What a process of an engine receives with.

    Args:
        rank: of this process, from ``broadcast.first_rank`` on.
        device: that it computes on.
    """
    receiver = "cpu" if broadcast.backend == "gloo" else device
    return WeightGroup(broadcast.address, rank, broadcast.size, broadcast.backend, receiver)


def _process_group(backend: str, address: str, rank: int, size: int, limit: timedelta) -> Any:
    """A bare group next to torch's default one, which is not touched.

    Keys have the prefixes that ``torch.distributed`` gives them, so that an engine may join with its own functions.
    """
    import torch

    distributed: Any = torch.distributed
    host, _, port = address.rpartition(":")
    options: Any = {}
    if rank == 0:
        # By itself the store would listen on every interface.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        options = {"master_listen_fd": socket.create_server((host, int(port)), family=family).detach()}
    store = distributed.TCPStore(host, int(port), size, rank == 0, limit, **options)
    for prefix in (GROUP_NAME, f"{GROUP_NAME}/", "cuda/" if backend == "nccl" else "cpu/"):
        store = distributed.PrefixStore(prefix, store)
    group = distributed.ProcessGroupNCCL if backend == "nccl" else distributed.ProcessGroupGloo
    options = group.Options() if backend == "nccl" else group._Options()
    options._timeout = limit
    if backend != "nccl":
        # By itself it takes the address of the host's name, which is often the loopback's.
        # And this function, unlike torch.distributed, does not read GLOO_SOCKET_IFNAME.
        here = {"hostname": host if ipaddress.ip_address(host).is_loopback else host_address()}
        named = named_interface()
        options._devices = [group.create_device(**({"interface": named} if named else here))]
    return group(store, rank, size, options)


def _settle(device: "torch.device") -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _name_of(device: "torch.device") -> str:
    """The same in all processes that compute on it."""
    import torch

    name = torch.cuda.get_device_properties(device).uuid if device.type == "cuda" else socket.gethostname()
    return f"{name} "


def _opened(handle: str, device: "torch.device") -> "torch.Tensor":
    import torch

    # Not a pickle, which would execute what a stranger wrote to the store.
    parts = ast.literal_eval(handle)
    if device.type == "cuda":
        # The first part is the device's index, which differs between processes.
        here = device.index if device.index is not None else torch.cuda.current_device()
        storages: Any = torch.UntypedStorage
        storage = storages._new_shared_cuda(here, *parts[1:])
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    return torch.from_file(parts[0], shared=True, size=parts[1], dtype=torch.uint8)
