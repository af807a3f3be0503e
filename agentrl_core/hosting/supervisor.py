"""The first process of a child: it forks the one with foreign code, and ends with everything that this one started.

It has few imports, holds no secret, and runs no foreign code. Processes that leave their parent become its children, so
that none is lost. The end comes when the run closes its end of the socket or dies, or when the other process exits.
"""

import os
import select
import signal
import time
from contextlib import suppress

from agentrl_core.hosting.confinement import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    SIGNALS_SINCE,
    confine,
    keep_signals,
    landlock_version,
    prctl,
)
from agentrl_core.hosting.processes import family

_CHECK_SECONDS = 1.0
"""Seconds between two checks that the run is alive: a process that it forked may hold its end of the socket."""


def main() -> None:
    """Serve the socket that is this process's stdin."""
    run, this = os.getppid(), os.getpid()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    version = landlock_version()
    alone = version >= SIGNALS_SINCE and _signals_only_descendants(run, version)
    worker = os.fork()
    if worker == 0:
        # In this session, so that it is found where this process was killed.
        os.setpgid(0, 0)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != this:
            os._exit(1)
        confine(version)
        from agentrl_core.hosting.process_child import serve

        serve()
        return
    code = _watch(worker, run)
    with suppress(OSError):
        os.killpg(worker, signal.SIGKILL)
    kill_descendants(alone)
    os._exit(code)


def _signals_only_descendants(run: int, version: int) -> bool:
    """Give up signals to other processes; returns whether that is so, and not only what the kernel said."""
    keep_signals(version)
    try:
        os.kill(run, 0)
    except PermissionError:
        return True
    except ProcessLookupError:
        pass
    return False


def _watch(worker: int, run: int) -> int:
    """Wait for the end; returns the exit code, which is 128 + n after signal n."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poll = select.poll()
    poll.register(0, 0)
    poll.register(woken, select.POLLIN)
    while True:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == worker:
                    code = os.waitstatus_to_exitcode(ended[1])
                    return code if code >= 0 else 128 - code
        ready = poll.poll(_CHECK_SECONDS * 1000)
        if any(each == 0 for each, _ in ready) or os.getppid() != run:
            return 0
        with suppress(BlockingIOError):
            os.read(woken, 4096)


def kill_descendants(alone: bool) -> None:
    """Kill every descendant of this process, also those that appear meanwhile, until there is none.

    Args:
        alone: no other process gets a signal of this one. Then one signal to all of them kills also those that have
            forked and exited before anybody sees them in a list.
    """
    while found := family(os.getpid()) - {os.getpid()}:
        for pid in [-1] if alone else found:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.002)
