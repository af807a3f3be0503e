"""Weights handed over on one device, in memory that the actor shares with the engine's process: CUDA IPC.

The actor fills a buffer, whoever computes on the same device copies what it holds, and the actor fills it again. All
meet in a store on the host of the actor's rank 0. On the CPU the buffer is in the shared memory of the host.

    buffer = WeightBuffer(address, size=2, device=device, is_actor=True, opens_store=True)  # the actor, on each device
    buffer.broadcast(tensor)
    buffer = WeightBuffer(address, size=2, device=device)                                   # an engine's process
    for name, tensor in buffer.receive(names, shapes, dtypes): ...
"""

import ast
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl_core.api.errors import EngineError
from agentrl_core.engine_kit.weight_group import TIMEOUT, WeightGroup, cut, total_bytes

if TYPE_CHECKING:
    import torch

MEMORY = Path("/dev/shm")


class WeightBuffer:
    """One process that writes to, or reads from, the buffer of its device. Blocks until all have come.

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
        import torch

        host, _, port = address.rpartition(":")
        self._timeout = timeout
        self._device = device
        self._address = address
        self._name = _name_of(device)
        self._number = 0
        self._generation = 0
        self._shared: torch.Tensor | None = None
        self._file = ""
        try:
            self._store: Any = torch.distributed.TCPStore(  # type: ignore[attr-defined]
                host, int(port), None, opens_store, timedelta(seconds=timeout), wait_for_workers=False
            )
        except RuntimeError as error:
            raise EngineError(f"no store at {address}, where weights are to be handed over: {error}") from error
        if is_actor:
            self._writes = self._store.add(f"{self._name}/actors", 1) == 1
            self._wait("everybody")
            self._readers = int(self._store.add(f"{self._name}/engines", 0))
        else:
            self._store.add(f"{self._name}/engines", 1)
            if self._store.add("engines", 1) == size - 1:
                self._store.set("everybody", "")
            self._wait("everybody")

    def broadcast(self, tensor: "torch.Tensor") -> None:
        """Hand over the bytes of a tensor [n] uint8 of this device. Returns when all readers there have them."""
        if not self._writes or not self._readers:
            return
        target = self._room_for(tensor.numel())
        target[: tensor.numel()].copy_(tensor)
        self._settle()
        self._store.set(self._key("filled"), str(self._generation))
        self._wait(self._key("taken"))
        self._forget_file()
        self._store.delete_key(self._key("filled"))
        self._store.delete_key(self._key("taken"))
        self._number += 1

    def receive(
        self, names: Sequence[str], shapes: Sequence[Sequence[int]], dtypes: Sequence[str]
    ) -> "Iterator[tuple[str, torch.Tensor]]":
        """The tensors of the bucket that is handed over next, in memory of their own."""
        self._wait(self._key("filled"))
        generation = int(self._store.get(self._key("filled")))
        if self._shared is None or generation != self._generation:
            self._generation = generation
            self._shared = _opened(self._store.get(f"{self._name}/buffer/{generation}").decode(), self._device)
        # The actor fills the buffer again, and a loader may hold on to what it gets.
        taken = self._shared[: total_bytes(shapes, dtypes)].clone()
        self._settle()
        readers = int(self._store.add(f"{self._name}/engines", 0))
        if self._store.add(self._key("readers"), 1) == readers:
            self._store.delete_key(self._key("readers"))
            self._store.set(self._key("taken"), "")
        self._number += 1
        yield from cut(taken, names, shapes, dtypes)

    def _room_for(self, nbytes: int) -> "torch.Tensor":
        import torch

        if self._shared is None or self._shared.numel() < nbytes:
            if self._device.type == "cuda":
                self._shared = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
                storage: Any = self._shared.untyped_storage()
                handle = storage._share_cuda_()
            else:
                folder = MEMORY if os.access(MEMORY, os.W_OK) else None
                descriptor, self._file = tempfile.mkstemp(prefix="agentrl-weight-buffer-", dir=folder)
                os.ftruncate(descriptor, nbytes)
                os.close(descriptor)
                handle = self._file, nbytes
                self._shared = _map_file(*handle)
            self._generation += 1
            # In Python's notation: numbers, bytes and text.
            self._store.set(f"{self._name}/buffer/{self._generation}", repr(handle))
        return self._shared

    def _forget_file(self) -> None:
        # Whoever has mapped it keeps it, and nothing is left when this process is killed.
        if self._file:
            Path(self._file).unlink(missing_ok=True)
            self._file = ""

    def _key(self, what: str) -> str:
        return f"{self._name}/{what}/{self._number}"

    def _wait(self, key: str) -> None:
        try:
            self._store.wait([key], timedelta(seconds=self._timeout))
        except RuntimeError as error:
            raise EngineError(
                f"weights that are handed over on {self._name} (store at {self._address}): {key!r} has not come within "
                f"{self._timeout:g} s; is there an actor on this device, and do all engines live?"
            ) from error

    def _settle(self) -> None:
        import torch

        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Give the buffer up. A second call does nothing."""
        self._forget_file()
        self._shared = self._store = None


def _name_of(device: "torch.device") -> str:
    """The same in all processes that compute on it."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else socket.gethostname()


def _opened(handle: str, device: "torch.device") -> "torch.Tensor":
    import torch

    parts = ast.literal_eval(handle)
    if device.type != "cuda":
        return _map_file(*parts)
    # The first part is the device's index, which differs between processes.
    here = device.index if device.index is not None else torch.cuda.current_device()
    storages: Any = torch.UntypedStorage
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storages._new_shared_cuda(here, *parts[1:]))


def _map_file(path: str, nbytes: int) -> "torch.Tensor":
    import torch

    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


def join_as_engine(
    address: str, backend: str, rank: int, size: int, device: "torch.device"
) -> "WeightGroup | WeightBuffer":
    """What an engine's process receives with, as :class:`agentrl_core.api.weights.Broadcast` says.

    Args:
        rank: of this process.
        device: that it computes on.
    """
    if backend == "ipc":
        return WeightBuffer(address, size, device)
    return WeightGroup(address, rank, size, backend, "cpu" if backend == "gloo" else device)
