"""Starts one sandbox and waits for it; a process between agentrl and the sandbox, with few imports: each costs time.

It stops the sandbox when the pipe to agentrl says so or closes, so that no sandbox outlives its trajectory, or agentrl.
When the sandbox has ended, it kills what that left behind and deletes its directory.
"""

import ctypes
import errno
import json
import os
import select
import signal
import sys
import time
from contextlib import suppress

Spec = dict  # type: ignore[type-arg]
PR_SET_CHILD_SUBREAPER = 36
DISK_INTERVAL = 0.25
"""Seconds between two looks at the size of the sandbox's directory."""


def start_sandlock(spec: Spec) -> int:
    """Start the command in sandlock, in namespaces of its own if asked; returns the id of the process above it."""
    sys.path.append(spec["sandlock"])
    from sandlock import Sandbox

    def confined() -> int:
        result = Sandbox(**spec["policy"]).popen(spec["command"], stdin=0, stdout=0, stderr=0).wait()
        return result.exit_code if result.exit_code >= 0 else 128 + signal.SIGKILL

    if "namespaces" in spec:
        sys.path.append(os.path.dirname(__file__))
        import namespaces

        return namespaces.run(confined, **spec["namespaces"])
    if pid := os.fork():
        return pid
    os.close(spec["lifeline"])
    os._exit(confined())


def start_command(spec: Spec) -> int:
    """Start the command, which may be bubblewrap's; returns its process id."""
    if pid := os.fork():
        return pid
    try:
        os.setsid()
        os.chdir(spec["folder"])
        os.execve(spec["command"][0], spec["command"], spec["env"])
    except OSError as error:
        os.write(2, f"{spec['command'][0]}: {error}\n".encode())
    finally:
        os._exit(1)


def wait(pid: int, spec: Spec) -> int:
    """Wait for a process, until agentrl says so, or its directory grows too large; returns its exit code."""
    # Without a limit here the directory is a file system of its own, which has one.
    interval = DISK_INTERVAL if "max_disk" in spec else None
    process = os.pidfd_open(pid)
    while process not in (ready := select.select([process, spec["lifeline"]], [], [], interval)[0]):
        if ready or size_of(spec["folder"]) > spec["max_disk"]:
            return 128 + signal.SIGKILL
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code


def size_of(folder: str) -> int:
    """Bytes of all files in a directory; each counts one block at least. What lies too deep to look at is too much."""
    size, folders = 0, [folder]
    while folders:
        try:
            for entry in os.scandir(folders.pop()):
                size += max(entry.stat(follow_symlinks=False).st_blocks * 512, 4096)
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return sys.maxsize
    return size


def delete(folder: str) -> None:
    """Delete a directory, however deep code has made it: what is in its directories moves up first.

    ``shutil.rmtree`` ends with a RecursionError, or at a path that is too long.
    """
    moved = 0
    with suppress(OSError):
        while entries := list(os.scandir(folder)):
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)
                for inner in os.scandir(entry.path):
                    if inner.is_dir(follow_symlinks=False):
                        os.chmod(inner.path, 0o700)
                    moved += 1
                    os.rename(inner.path, f"{folder}/{os.getpid()}-{moved}-{os.urandom(8).hex()}")
                os.rmdir(entry.path)
        os.rmdir(folder)


def kill_descendants() -> None:
    """Kill every process below this one, until there is none. Orphans become children of this process.

    The deepest first: where sandlock ends before the code that it confines, system calls of the code fail strangely.
    """
    while has_children():
        parents = {}
        for name in os.listdir("/proc"):
            with suppress(OSError, ValueError), open(f"/proc/{int(name)}/stat") as file:
                parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
        found, new = list[int](), {os.getpid()}
        while new := {pid for pid, parent in parents.items() if parent in new}.difference(found):
            found += new
        for pid in reversed(found):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def has_children() -> bool:
    """Whether there are any after those that have ended are reaped. Whatever has no children has no descendants."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    return False


def main() -> int:
    """Run the sandbox of the specification; returns its exit code."""
    spec = json.loads(sys.argv[1])
    os.set_inheritable(spec["lifeline"], False)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    start = start_sandlock if "policy" in spec else start_command
    try:
        return wait(start(spec), spec)
    finally:
        kill_descendants()
        delete(spec["folder"])


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Without waiting for threads.
    os._exit(code)
