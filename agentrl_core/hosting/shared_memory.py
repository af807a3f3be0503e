"""Shared memory of runs that were killed: each run records its own, and the next start on the machine removes it."""

import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agentrl_core.engine_kit.memory_files import KINDS, mapped_memory
from agentrl_core.engine_kit.processes import family

logger = logging.getLogger(__name__)
MEMORY = Path("/dev/shm")
RECORD = "agentrl-memory-of-"


@contextmanager
def shared_memory_recorded() -> Iterator[None]:
    """Keep a record of the shared memory of this process and its descendants, for as long as the block runs."""
    names = sorted({name for pid in family(os.getpid()) for name in mapped_memory(pid, MEMORY)})
    if not names:
        yield
        return
    # The record could not be trusted in another namespace of process ids: containers may share /dev/shm.
    owner = {"pid": os.getpid(), "started": _started(os.getpid()), "namespace": _namespace(), "names": names}
    record = MEMORY / f"{RECORD}{os.getpid()}-{os.urandom(4).hex()}"
    try:
        with suppress(OSError), open(record, "x", encoding="utf-8") as file:
            json.dump(owner, file)
        yield
    finally:
        record.unlink(missing_ok=True)


def remove_orphans() -> None:
    """Remove what runs of this user recorded whose process is dead. Memory without a record is left alone."""
    for record in MEMORY.glob(f"{RECORD}*"):
        try:
            if record.lstat().st_uid != os.getuid():
                continue
            owner = json.loads(record.read_text(encoding="utf-8"))
            if owner["namespace"] != _namespace() or owner["started"] == _started(owner["pid"]):
                continue
            names = [name for name in owner["names"] if name.startswith(KINDS) and "/" not in name]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        for path in [*(MEMORY / name for name in names), record]:
            with suppress(OSError):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        logger.info("removed the shared memory of a run that was killed (process %s): %s", owner["pid"], names)


def _started(pid: int) -> str | None:
    """When a process started, in clock ticks since boot: its id may belong to another one later. None: no process."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return None


def _namespace() -> str:
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""
