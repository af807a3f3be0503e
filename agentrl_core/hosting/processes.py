"""Finds and kills processes with their descendants, by Linux's /proc; elsewhere only a process's own group."""

import os
import signal
from contextlib import suppress
from pathlib import Path

from agentrl_core.engine_kit.processes import family as family


def kill_family(pid: int) -> None:
    """Kill the session that a child of this process leads, and its descendants in other sessions.

    This includes processes that outlived their leader. Call it before another process can get the leader's id.
    """
    for each in family(pid, whole_session=True) - {pid}:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def family_memory(pid: int) -> int | None:
    """Proportional set size of a process and its descendants, in bytes; None where /proc does not show it."""
    total = 0
    try:
        for each in family(pid):
            with suppress(FileNotFoundError, ProcessLookupError):
                text = Path(f"/proc/{each}/smaps_rollup").read_text()
                total += int(next(line for line in text.splitlines() if line.startswith("Pss:")).split()[1]) << 10
    except (OSError, StopIteration):
        return None
    return total or None
