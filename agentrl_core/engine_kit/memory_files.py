"""Files in the host's memory (``/dev/shm``): weights for engines on this host, and whatever must not outlive a process.

file = WeightFile(layout)                # the file's pages are allocated once
file.views["model.norm.weight"][:] = ... # an update overwrites the bytes, and nobody copies them
"""

import json
import mmap
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_core.api.errors import EngineError
from agentrl_core.api.weights import SAFETENSORS_DTYPES, ArrayBucket
from agentrl_core.engine_kit.processes import family

MEMORY = Path("/dev/shm")
ROOM = 1.1
"""What must be free in memory, as a multiple of what is to be written."""
KINDS = ("agentrl-", "psm_", "sem.mp-", "sgl_shm_", "sglang_loads_")
"""Beginnings of the names that agentrl, Python's multiprocessing and SGLang give to shared memory."""
_CODES = {torch_name: code for code, torch_name in SAFETENSORS_DTYPES.items()}

# It outlives this process, however that ends, and removes the folder: end-of-file on its input means our death. Its own
# session and parent protect it from signals that end a whole group of processes.
_REAPER = 'exec 3<&0; (cat <&3 >/dev/null; rm -rf -- "$@") >/dev/null 2>&1 &'


def memory_parent(nbytes: int = 0) -> Path:
    """``/dev/shm`` where it is writable and has room for so many bytes, else the directory for temporary files."""
    if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM * nbytes + (1 << 20):
        return MEMORY
    return Path(tempfile.gettempdir())


class MemoryFolder:
    """A folder that is removed by :meth:`close`, or when this process ends, even if it is killed.

    Args:
        name: part of the folder's name.
        nbytes: to be written there; decides whether they fit into memory.
        parent: where to create it; default: see :func:`memory_parent`.
    """

    def __init__(self, name: str, nbytes: int = 0, parent: Path | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"agentrl-{name}-", dir=parent or memory_parent(nbytes)))
        self._reaper = _start_reaper([self.path])

    def close(self) -> None:
        """Remove the folder. A second call does nothing."""
        if self._reaper.stdin is not None:
            self._reaper.stdin.close()
        shutil.rmtree(self.path, ignore_errors=True)


def _start_reaper(paths: Iterable[Path]) -> "subprocess.Popen[bytes]":
    reaper = subprocess.Popen(
        ["/bin/sh", "-c", _REAPER, "sh", *map(str, paths)], stdin=subprocess.PIPE, start_new_session=True
    )
    # The shell itself ends immediately; what it started in the background waits for the pipe.
    reaper.wait()
    return reaper


def mapped_memory(pid: int, memory: Path = MEMORY) -> set[str]:
    """Names of the shared memory that a process has mapped, as far as it is of :data:`KINDS`."""
    with suppress(OSError):
        paths = (line.partition(f"{memory}/")[2] for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
        names = {path.partition("/")[0] for path in paths if not path.endswith(" (deleted)")}
        return {name for name in names if name.startswith(KINDS)}
    return set()


class SharedMemoryOf:
    """Shared memory that an engine's processes have made, and may leave behind.

    It is removed by :meth:`close`, or when this process ends, even if it is killed.

    Args:
        pids: processes that are the engine's alone. What they and their descendants have mapped is theirs.
        memory: where it is.
    """

    def __init__(self, pids: Iterable[int], memory: Path = MEMORY) -> None:
        names = {name for pid in pids for each in family(pid) for name in mapped_memory(each, memory)}
        # Folders have an owner that removes them.
        self._paths = [memory / name for name in sorted(names) if not name.startswith("agentrl-")]
        self._reaper = _start_reaper(self._paths) if self._paths else None

    def close(self) -> None:
        """Remove it; the engine's processes have ended. A second call does nothing."""
        if self._reaper is not None and self._reaper.stdin is not None:
            self._reaper.stdin.close()
        for path in self._paths:
            path.unlink(missing_ok=True)


class WeightFile:
    """One safetensors file in memory, allocated once and overwritten by every update.

    Args:
        layout: all tensors; the ``data`` of these buckets is not read.
        parent: see :class:`MemoryFolder`.

    Attributes:
        path: of the file.
        views: bytes (uint8, writable) of each tensor, by name.

    Raises:
        EngineError: there is no room for the tensors.
    """

    def __init__(self, layout: Sequence[ArrayBucket], parent: Path | None = None) -> None:
        header, ends = _header(layout)
        size = len(header) + max(ends.values(), default=0)
        self._folder = MemoryFolder("weights", size, parent)
        self.path = str(self._folder.path / "weights.safetensors")
        try:
            with open(self.path, "x+b", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                # A full file system is an error here; to a write through the map it would be a fatal signal.
                os.posix_fallocate(file.fileno(), 0, size)
                file.write(header)
                file.flush()
                mapped = np.frombuffer(mmap.mmap(file.fileno(), size), dtype=np.uint8)[len(header) :]
        except OSError as error:
            self._folder.close()
            raise EngineError(
                f"weights ({size} bytes) cannot be written to {self._folder.path}: {error}; make room there, or set "
                "TMPDIR to a directory that has it"
            ) from error
        starts = [0, *ends.values()]
        self.views = {name: mapped[start:end] for start, (name, end) in zip(starts, ends.items(), strict=False)}

    def close(self) -> None:
        """Remove the file. A second call does nothing."""
        self.views = {}
        self._folder.close()


def writable_views(path: str) -> dict[str, "np.ndarray[Any, np.dtype[np.uint8]]"] | None:
    """The :attr:`WeightFile.views` of a file that another process of this host has made; None where it is not there."""
    try:
        with open(path, "r+b") as file:
            mapped = np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.uint8)
    except FileNotFoundError:
        return None
    length = int.from_bytes(mapped[:8].tobytes(), "little")
    data, entries = mapped[8 + length :], json.loads(mapped[8 : 8 + length].tobytes())
    return {name: data[slice(*entry["data_offsets"])] for name, entry in entries.items()}


def write_safetensors(path: str | os.PathLike[str], bucket: ArrayBucket) -> None:
    """Write a bucket to a safetensors file, whose bytes are the bucket's: the inverse of ``map_safetensors``.

    Raises:
        OSError: the file cannot be written.
    """
    with open(path, "wb") as file:
        file.write(_header([bucket])[0])
        np.ascontiguousarray(bucket.data).tofile(file)


def merged(buckets: Sequence[ArrayBucket]) -> ArrayBucket:
    """One bucket with the tensors of all, in a copy."""
    return ArrayBucket(
        names=tuple(name for bucket in buckets for name in bucket.names),
        shapes=tuple(shape for bucket in buckets for shape in bucket.shapes),
        dtypes=tuple(dtype for bucket in buckets for dtype in bucket.dtypes),
        data=np.concatenate([bucket.data for bucket in buckets]) if buckets else np.empty(0, np.uint8),
    )


def _header(layout: Iterable[ArrayBucket]) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a safetensors file, and where each tensor's bytes end behind them."""
    entries: dict[str, Any] = {}
    ends: dict[str, int] = {}
    start = 0
    for bucket in layout:
        for name, shape, dtype, size in zip(bucket.names, bucket.shapes, bucket.dtypes, bucket.sizes, strict=True):
            ends[name] = start + size
            entries[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [start, ends[name]]}
            start = ends[name]
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data to 8 bytes
    return len(text).to_bytes(8, "little") + text, ends
