"""Namespaces of its own for a sandbox that does not make them itself; imported by ``launch.py`` only.

bubblewrap does the same for its sandboxes. This is for machines where only sandlock, a Python package, is installed.
"""

import ctypes
import os
import signal
import struct
from collections.abc import Callable, Sequence

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_NS, _NEW_CGROUP, _NEW_UTS, _NEW_IPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
_NEW_USER, _NEW_PID, _NEW_NET = 0x10000000, 0x20000000, 0x40000000
_PR_SET_PDEATHSIG = 1
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_SLAVE = 2, 4, 8, 0x4000, 0x80000
_MNT_DETACH = 2
# These have the same number on every architecture.
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE_CLONE, _MOVE_FROM_EMPTY_PATH = 1, 4
_READ_ONLY, _NO_SETUID, _NO_DEVICES = 1, 2, 4


def run(inside: Callable[[], int], work: str, size: int, readable: Sequence[str], devices: Sequence[str]) -> int:
    """Fork the first process of new namespaces and run ``inside`` in it; returns its process id.

    It sees ``readable`` read-only, ``devices``, a /proc of its own processes, and at ``work`` an empty file system in
    memory of ``size`` bytes. When it ends, so does every process in its namespace; it ends with the caller.

    Raises:
        OSError: the kernel or the container does not allow it. What fails in the new process is its exit code 1.
    """
    user, group = os.geteuid(), os.getegid()
    _call("unshare", _NEW_USER | _NEW_PID | _NEW_NET | _NEW_IPC | _NEW_UTS | _NEW_CGROUP)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    if pid := os.fork():
        return pid
    code = 1
    try:
        _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        _see_only(work, size, readable, devices)
        code = inside()
    except OSError as error:
        os.write(2, f"{error}\n".encode())
    finally:
        os._exit(code)


def _see_only(work: str, size: int, readable: Sequence[str], devices: Sequence[str]) -> None:
    """Change to a root directory with nothing but these paths."""
    _call("unshare", _NEW_NS)
    _call("mount", None, b"/", None, _MS_REC | _MS_SLAVE, None)
    trees = [
        *(_tree(path, _READ_ONLY | _NO_SETUID | _NO_DEVICES) for path in readable),
        # Data can be written to a device that is mounted read-only; its rights and times cannot be changed.
        *(_tree(path, _READ_ONLY | _NO_SETUID) for path in devices),
    ]
    # From here on the directory is the root, and a part of it is where the directory was.
    root = work
    _call("mount", b"tmpfs", root.encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, b"mode=0755,size=1m")
    for tree, path in zip(trees, [*readable, *devices], strict=True):
        place = root + path
        if os.path.isdir(tree):
            os.makedirs(place, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(place), exist_ok=True)
            os.close(os.open(place, os.O_CREAT | os.O_CLOEXEC, 0o644))
        _call("syscall", _MOVE_MOUNT, tree, b"", _AT_FDCWD, place.encode(), _MOVE_FROM_EMPTY_PATH)
        os.close(tree)
    for place in (root + work, root + "/proc"):
        os.makedirs(place, exist_ok=True)
    limits = f"mode=0700,size={size},nr_inodes={max(size // 4096, 64)}"
    _call("mount", b"tmpfs", (root + work).encode(), b"tmpfs", _MS_NOSUID | _MS_NODEV, limits.encode())
    _call("mount", b"proc", f"{root}/proc".encode(), b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, None)
    os.chdir(root)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", _MNT_DETACH)
    os.chdir("/")
    _set(_AT_FDCWD, b"/", _READ_ONLY, 0)


def _tree(path: str, attributes: int) -> int:
    """A copy of the mounts at a path, not yet anywhere."""
    tree = _call("syscall", _OPEN_TREE, _AT_FDCWD, path.encode(), _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_RECURSIVE)
    _set(tree, b"", attributes, _AT_EMPTY_PATH | _AT_RECURSIVE)
    return tree


def _set(folder: int, path: bytes, attributes: int, flags: int) -> None:
    wanted = struct.pack("=QQQQ", attributes, 0, 0, 0)
    _call("syscall", _MOUNT_SETATTR, folder, path, flags, wanted, len(wanted))


def _call(name: str, *arguments: object) -> int:
    """Call a function of the C library.

    Raises:
        OSError: it failed.
    """
    whole = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result: int = getattr(_LIBC, name)(*whole)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{os.strerror(error)}: {name} for namespaces of its own")
    return result
