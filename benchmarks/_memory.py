"""Memory of processes and of Ray's object store on this machine, read from /proc."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

SAMPLE_SECONDS = 0.005


def anonymous_bytes(pids: Sequence[int]) -> int:
    """Memory that belongs to these processes alone: no files, no shared memory."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                total += int(line.split()[1]) * 1024
    return total


def store_files() -> list[str]:
    """The files of the object store that this process's Ray holds open; to be asked for after the first large put."""
    raylets = [pid for pid in _children(os.getpid()) if Path(f"/proc/{pid}/comm").read_text().strip() == "raylet"]
    descriptors = [path for pid in raylets for path in Path(f"/proc/{pid}/fd").iterdir()]
    return [str(path) for path in descriptors if "/plasma" in _target(path)]


def _target(descriptor: Path) -> str:
    """The file of a descriptor; empty where it has been closed meanwhile."""
    try:
        return os.readlink(descriptor)
    except FileNotFoundError:
        return ""


def store_bytes(files: Sequence[str]) -> int:
    """What the files of the store take up: their pages that were ever written to."""
    return sum(os.stat(file).st_blocks * 512 for file in files)


class PeakMemory:
    """The largest anonymous memory of some processes plus their store while the block runs, and its growth."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = list(pids)
        self._files = store_files()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.before = self.peak = 0

    @property
    def growth(self) -> int:
        """Bytes above what there was at the start of the block."""
        return self.peak - self.before

    def __enter__(self) -> Self:
        self.before = self.peak = self._now()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self.peak = max(self.peak, self._now())

    def _now(self) -> int:
        return anonymous_bytes(self._pids) + store_bytes(self._files)

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self.peak = max(self.peak, self._now())


def _children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
