"""Weights in safetensors files that live in memory and are overwritten in place: the road to engines on this host.

A file's pages are allocated once. Later updates copy the bytes over the old ones and leave the header as it is, so an
update costs little more than one copy of the weights, and whoever maps the file copies nothing.
"""

import json
import math
import mmap
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentrl_core.api.errors import EngineError
from agentrl_core.api.weights import DTYPE_BYTES, SAFETENSORS_DTYPES, ArrayBucket

MEMORY = Path("/dev/shm")
FILE_BYTES = 1 << 30
"""A file holds as many buckets as fit into this, and at least one tensor."""
HEADER_BYTES = 1 << 18
"""Room for the header, which is known only when the last tensor has come; spaces fill it up."""
ROOM = 1.1
"""What must be free in memory, as a multiple of the weights."""
_NAMES = {torch_name: name for name, torch_name in SAFETENSORS_DTYPES.items()}
_ALIGNMENT = 8

# Outlives this process, however that ends, and takes the directory away: end-of-file on its input is our death. Its
# own session and parent keep the signals from it that end a whole group of processes.
_REAPER = 'exec 3<&0; (cat <&3 >/dev/null; rm -rf -- "$1") >/dev/null 2>&1 &'

Place = tuple[str, tuple[int, ...], str, int]
"""Name, shape, dtype and offset of a tensor."""


class WeightFiles:
    """Writes weights to files, the same ones each time.

    Args:
        nbytes: of all weights; decides whether they fit into memory.
        directory: where to make the files' own directory; default: ``/dev/shm`` where it has room, else the
            directory for temporary files.
    """

    def __init__(self, nbytes: int, directory: Path | None = None) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="agentrl-weights-", dir=directory or _parent(nbytes)))
        self._files: list[_File] = []
        self._reaper = subprocess.Popen(
            ["/bin/sh", "-c", _REAPER, "sh", str(self.directory)], stdin=subprocess.PIPE, start_new_session=True
        )
        # The shell itself ends at once; what it started in the background waits for the pipe.
        self._reaper.wait()

    def write(self, buckets: Iterable[ArrayBucket]) -> tuple[str, ...]:
        """Paths of the files with all tensors of ``buckets``; they hold still until the next call.

        Raises:
            EngineError: the tensors are not those of the first call, or there is no room for them.
        """
        is_first = not self._files
        number = 0
        try:
            for bucket in buckets:
                for name, shape, dtype, data in bucket.tensors():
                    while is_first and not (self._files and self._files[-1].has_room(name, data.nbytes)):
                        self._start_file(data.nbytes)
                    while not is_first and number < len(self._files) and self._files[number].is_complete:
                        number += 1
                    if not is_first and number == len(self._files):
                        raise EngineError(f"weights: {name} is new; the first update did not have it")
                    self._files[number if not is_first else -1].put(name, shape, dtype, data)
            for file in self._files:
                file.finish()
        except OSError as error:
            raise EngineError(
                f"weights cannot be written to {self.directory}: {error}; make room there, or set TMPDIR to a "
                "directory that has it"
            ) from error
        return tuple(str(file.path) for file in self._files)

    def places(self) -> dict[str, tuple[tuple[int, ...], str, "np.ndarray[Any, Any]"]]:
        """Shape, dtype and bytes (a writable view) of each tensor that has been written, by name."""
        return {
            name: (shape, dtype, file.view(start, math.prod(shape) * DTYPE_BYTES[dtype]))
            for file in self._files
            for name, shape, dtype, start in file.places
        }

    def _start_file(self, nbytes: int) -> None:
        path = self.directory / f"weights-{len(self._files):05d}.safetensors"
        self._files.append(_File(path, HEADER_BYTES + max(FILE_BYTES, nbytes + _ALIGNMENT)))

    def close(self) -> None:
        """Remove the files. A second call does nothing."""
        for file in self._files:
            file.close()
        self._files.clear()
        if self._reaper.stdin is not None and not self._reaper.stdin.closed:
            self._reaper.stdin.close()
        shutil.rmtree(self.directory, ignore_errors=True)


@dataclass
class _Cursor:
    index: int = 0
    offset: int = 0


class _File:
    """One file, mapped for as long as the run lasts."""

    def __init__(self, path: Path, capacity: int) -> None:
        self.path = path
        self._capacity = capacity
        self.places: list[Place] = []
        self._is_new = True
        self._cursor = _Cursor()
        self._header_bytes = 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        # Sparse: pages are allocated tensor by tensor.
        os.ftruncate(self._fd, capacity)
        self._map = mmap.mmap(self._fd, capacity)
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)

    def has_room(self, name: str, nbytes: int) -> bool:
        """The file, which is being written for the first time, can take another tensor."""
        header = self._header_bytes + len(name) + 200
        return header < HEADER_BYTES - 8 and HEADER_BYTES + self._cursor.offset + nbytes <= self._capacity

    @property
    def is_complete(self) -> bool:
        """Every tensor of the file has been overwritten."""
        return not self._is_new and self._cursor.index == len(self.places)

    def put(self, name: str, shape: tuple[int, ...], dtype: str, data: "np.ndarray[Any, Any]") -> None:
        """The next tensor, in the order of the first time."""
        cursor = self._cursor
        if math.prod(shape) * DTYPE_BYTES[dtype] != data.nbytes:
            raise EngineError(f"weights: {name} {list(shape)} {dtype} came with {data.nbytes} bytes")
        if self._is_new:
            self.places.append((name, shape, dtype, cursor.offset))
            self._header_bytes += len(json.dumps(name)) + 160
            if data.nbytes:
                # A full file system is an error here; to a write through the map it would be a fatal signal.
                os.posix_fallocate(self._fd, HEADER_BYTES + cursor.offset, data.nbytes)
        elif self.places[cursor.index][:3] != (name, shape, dtype):
            was = self.places[cursor.index]
            raise EngineError(
                f"weights: {name} {list(shape)} {dtype} came where the first update had "
                f"{was[0]} {list(was[1])} {was[2]}"
            )
        np.copyto(self.view(cursor.offset, data.nbytes), data)
        cursor.index += 1
        cursor.offset += data.nbytes

    def view(self, start: int, nbytes: int) -> "np.ndarray[Any, Any]":
        """These bytes of the tensors, writable."""
        return self._bytes[HEADER_BYTES + start : HEADER_BYTES + start + nbytes]

    def finish(self) -> None:
        """All tensors have come."""
        if self._is_new:
            header = {
                name: {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, start + size]}
                for name, shape, dtype, start in self.places
                for size in [math.prod(shape) * DTYPE_BYTES[dtype]]
            }
            text = json.dumps(header).encode().ljust(HEADER_BYTES - 8)
            os.pwrite(self._fd, struct.pack("<Q", len(text)) + text, 0)
            # What lies behind is mapped but never touched.
            os.ftruncate(self._fd, HEADER_BYTES + self._cursor.offset)
            self._is_new = False
        elif not self.is_complete:
            raise EngineError(f"weights: {self.places[self._cursor.index][0]} is missing from the update")
        self._cursor = _Cursor()

    def close(self) -> None:
        # The map goes with its last view.
        del self._bytes, self._map
        os.close(self._fd)


def _parent(nbytes: int) -> Path:
    if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM * nbytes + 2 * HEADER_BYTES:
        return MEMORY
    return Path(tempfile.gettempdir())
