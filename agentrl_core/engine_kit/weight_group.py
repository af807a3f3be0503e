"""Weights sent from the actor's device to those of the engines, bucket by bucket, as flat bytes.

Two classes with the same methods. :class:`WeightGroup` is a gloo or NCCL group: rank 0 sends, the others receive, on
any host; NCCL needs a device for each rank. :class:`WeightBuffer` is memory of a device that actor and engines share
(CUDA IPC): the actor fills it, the readers on that device copy it, and the actor fills it again. On the CPU that
memory is a file of the host.

    with WeightGroup(address, 0, 3) as group:                # the actor
        group.broadcast(tensor)
    with join_as_engine(broadcast, rank, device) as group:   # a process of an engine
        for name, tensor in group.receive(names, shapes, dtypes): ...

Ranks meet in a ``TCPStore`` on the host of the actor's rank 0. It has no authentication: whoever reaches the port can
read and write it. On one machine it listens on the loopback address only.
"""

import ast
import ipaddress
import math
import os
import socket
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from agentrl_core.api.errors import EngineError
from agentrl_core.api.weights import DTYPE_BYTES, Broadcast
from agentrl_core.engine_kit.memory_files import memory_parent
from agentrl_core.engine_kit.ports import host_address

if TYPE_CHECKING:
    import torch

TIMEOUT = 600.0
"""Seconds that ranks wait for each other."""
GROUP_NAME = "agentrl"
"""Of the group in ``torch.distributed``, for engines that join it with functions of their own."""

Tensors = Iterator[tuple[str, "torch.Tensor"]]


class WeightChannel(ABC):
    """What both classes do. ``broadcast`` sends flat bytes [n] uint8; ``receive`` yields the next bucket's tensors."""

    _store: Any = None

    def _open_store(self, address: str, size: int | None, is_server: bool, timeout: float) -> Any:
        import torch

        host, _, port = address.rpartition(":")
        make: Any = torch.distributed.TCPStore  # type: ignore[attr-defined]
        limit = timedelta(seconds=timeout)
        listener = None
        if is_server:
            # By itself the store would listen on every interface.
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, int(port)), family=family)
        options = {} if listener is None else {"master_listen_fd": listener.detach()}
        return make(host, int(port), size, is_server, limit, wait_for_workers=size is not None, **options)

    @abstractmethod
    def broadcast(self, tensor: "torch.Tensor") -> None:
        """Send the bytes of a contiguous tensor. Returns when the receivers have them."""

    @abstractmethod
    def receive(self, names: Sequence[str], shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> Tensors:
        """The tensors of the bucket that is sent next; they may share memory."""

    def close(self) -> None:
        """Leave. A second call does nothing."""
        self._store = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class WeightGroup(WeightChannel):
    """One rank of a group. Blocks until all ranks have come.

    Args:
        address: ``host:port`` of the store, which rank 0 opens there.
        rank: of this process; 0 sends.
        size: of the group.
        backend: ``gloo`` for tensors on the host, ``nccl`` for those on CUDA devices.
        device: on which a receiver wants the tensors: the CPU with gloo.
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
        self._device = device
        try:
            self._store = self._open_store(address, size, rank == 0, timeout)
            host = address.rpartition(":")[0]
            self._group: Any = _process_group(backend, host, self._store, rank, size, timedelta(seconds=timeout))
        except (RuntimeError, OSError) as error:
            raise EngineError(
                f"rank {rank} of the {size} that weights are to be sent in could not join the others at {address} "
                f"within {timeout:g} s; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the network interface: {error}"
            ) from error

    def receive(self, names: Sequence[str], shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> Tensors:
        """See :meth:`WeightChannel.receive`."""
        import torch

        received = torch.empty(total_bytes(shapes, dtypes), dtype=torch.uint8, device=self._device)
        self.broadcast(received)
        yield from cut(received, names, shapes, dtypes)

    def broadcast(self, tensor: "torch.Tensor") -> None:
        """Copy rank 0's tensor into everybody's."""
        if tensor.numel():
            self._group.broadcast(tensor, 0).wait()
        _settle(tensor.device)

    def close(self) -> None:
        """See :meth:`WeightChannel.close`."""
        self._group = None
        super().close()


class WeightBuffer(WeightChannel):
    """One process that writes to, or reads from, the buffer of its device. Blocks until all engines have come.

    Args:
        address: ``host:port`` of the store.
        size: processes of the engines, plus 1.
        device: of this process.
        is_actor: it writes. Where several do on one device, as on the CPU, only the first one's weights are taken.
        opens_store: it opens the store, which must live longest.
        timeout: [seconds] to wait for the others.

    Raises:
        EngineError: the others have not come in time, or no actor computes on this device.
    """

    def __init__(
        self,
        address: str,
        size: int,
        device: "torch.device",
        is_actor: bool = False,
        opens_store: bool = False,
        timeout: float = TIMEOUT,
    ) -> None:
        self._timeout, self._device, self._address = timeout, device, address
        self._name = _name_of(device)
        self._sent = 0
        self._room: torch.Tensor | None = None
        self._handle, self._file = "", ""
        self._readers: list[int] = []
        try:
            self._store = self._open_store(address, None, opens_store, timeout)
        except (RuntimeError, OSError) as error:
            raise EngineError(f"no store at {address}, where weights are to be handed over: {error}") from error
        if not is_actor:
            self._reader = int(self._store.add("engines", 1))
            self._store.set(f"engine {self._reader}", self._name)
        elif self._store.add(f"actors on {self._name}", 1) == 1:
            self._readers = [each for each in range(1, size) if self._get(f"engine {each}") == self._name]

    def broadcast(self, tensor: "torch.Tensor") -> None:
        """See :meth:`WeightChannel.broadcast`."""
        if not self._readers:
            return
        if self._room is None or self._room.numel() < tensor.numel():
            self._allocate(tensor.numel())
        assert self._room is not None
        self._room[: tensor.numel()].copy_(tensor)
        _settle(self._device)
        filled = f"{self._name}: bucket {self._sent}"
        taken = [f"{filled} taken by engine {reader}" for reader in self._readers]
        self._store.set(filled, self._handle)
        for key in taken:
            self._get(key)
        for key in (filled, *taken):
            self._store.delete_key(key)
        # A process that has mapped the file keeps it, and nothing is left when this process is killed.
        self._forget_file()
        self._sent += 1

    def receive(self, names: Sequence[str], shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> Tensors:
        """See :meth:`WeightChannel.receive`. The tensors are copies: the actor fills the buffer again."""
        filled = f"{self._name}: bucket {self._sent}"
        handle = self._get(filled)
        if self._room is None or handle != self._handle:
            self._handle, self._room = handle, _opened(handle, self._device)
        taken = self._room[: total_bytes(shapes, dtypes)].clone()
        _settle(self._device)
        self._store.set(f"{filled} taken by engine {self._reader}", "")
        self._sent += 1
        yield from cut(taken, names, shapes, dtypes)

    def _allocate(self, nbytes: int) -> None:
        import torch

        if self._device.type == "cuda":
            self._room = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            storage: Any = self._room.untyped_storage()
            # In Python's notation: numbers, bytes and text, which the reader parses without executing anything.
            self._handle = repr(storage._share_cuda_())
            return
        descriptor, self._file = tempfile.mkstemp(prefix="agentrl-weight-buffer-", dir=memory_parent(nbytes))
        os.ftruncate(descriptor, nbytes)
        os.close(descriptor)
        self._handle = repr((self._file, nbytes))
        self._room = _opened(self._handle, self._device)

    def _get(self, key: str) -> str:
        try:
            self._store.wait([key], timedelta(seconds=self._timeout))
        except RuntimeError as error:
            raise EngineError(
                f"weights that are handed over on {self._name} (store at {self._address}): {key!r} has not come within "
                f"{self._timeout:g} s; is there an actor on this device, and do all engines live?"
            ) from error
        return str(self._store.get(key).decode())

    def _forget_file(self) -> None:
        if self._file:
            Path(self._file).unlink(missing_ok=True)
            self._file = ""

    def close(self) -> None:
        """See :meth:`WeightChannel.close`."""
        self._forget_file()
        self._room = None
        super().close()


def join_as_engine(broadcast: Broadcast, rank: int, device: "torch.device") -> WeightChannel:
    """What a process of an engine receives with.

    Args:
        rank: of this process, from ``broadcast.first_rank`` on.
        device: that it computes on.
    """
    if broadcast.backend == "ipc":
        return WeightBuffer(broadcast.address, broadcast.size, device)
    receiver = "cpu" if broadcast.backend == "gloo" else device
    return WeightGroup(broadcast.address, rank, broadcast.size, broadcast.backend, receiver)


def total_bytes(shapes: Sequence[Sequence[int]], dtypes: Sequence[str]) -> int:
    """Bytes of a bucket."""
    return sum(math.prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in zip(shapes, dtypes, strict=True))


def cut(
    received: "torch.Tensor", names: Sequence[str], shapes: Sequence[Sequence[int]], dtypes: Sequence[str]
) -> Tensors:
    """The tensors of a bucket whose bytes [n] uint8 have come; they share its memory where they can."""
    import torch

    sizes = [math.prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in zip(shapes, dtypes, strict=True)]
    for name, shape, dtype, part in zip(names, shapes, dtypes, torch.split(received, sizes), strict=True):
        # Bytes can be viewed as elements only where they begin at a multiple of an element's size.
        aligned = part if part.storage_offset() % DTYPE_BYTES[dtype] == 0 else part.clone()
        yield name, aligned.view(getattr(torch, dtype)).view(tuple(shape))


def _process_group(backend: str, host: str, store: Any, rank: int, size: int, limit: timedelta) -> Any:
    """A bare group beside torch's default one, which is not touched.

    Keys have the prefixes that ``torch.distributed`` gives them, so that an engine may join with its own functions.
    """
    import torch

    distributed: Any = torch.distributed
    device = "cuda" if backend == "nccl" else "cpu"
    for prefix in (GROUP_NAME, f"{GROUP_NAME}/", f"{device}/"):
        store = distributed.PrefixStore(prefix, store)
    if backend == "nccl":
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = limit
        return distributed.ProcessGroupNCCL(store, rank, size, options)
    options = distributed.ProcessGroupGloo._Options()
    options._timeout = limit
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        options._devices = [distributed.ProcessGroupGloo.create_default_device()]
    else:
        # By itself it takes the address of the host's name, which is often the loopback's.
        here = host if ipaddress.ip_address(host).is_loopback else host_address()
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=here)]
    return distributed.ProcessGroupGloo(store, rank, size, options)


def _settle(device: "torch.device") -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _name_of(device: "torch.device") -> str:
    """The same in all processes that compute on it."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else socket.gethostname()


def _opened(handle: str, device: "torch.device") -> "torch.Tensor":
    import torch

    parts = ast.literal_eval(handle)
    if device.type != "cuda":
        return torch.from_file(parts[0], shared=True, size=parts[1], dtype=torch.uint8)
    # The first part is the device's index, which differs between processes.
    here = device.index if device.index is not None else torch.cuda.current_device()
    storages: Any = torch.UntypedStorage
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storages._new_shared_cuda(here, *parts[1:]))
