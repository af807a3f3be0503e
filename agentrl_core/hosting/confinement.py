"""Keeps a process away from the memory, descriptors and environment of others, with Landlock.

Landlock needs no rights, also holds for root, and works in most containers. A confined process may look into processes
of its own domain only, which are those that it starts. Capabilities that lead around it are dropped.
"""

import ctypes
import os
import struct
import sys

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_NO_NEW_PRIVS = 38
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1
_CAPABILITIES_VERSION = 0x20080522
_KEPT = (0, 1, 2, 3, 4, 5, 6, 7, 10, 13, 18, 29, 31)
"""Capabilities that root keeps, by their numbers in the kernel: for files, users and its own network. Containers grant
these by default."""
_PATH_BENEATH = 1
_MAKE_BLOCK, _REFER = 1 << 11, 1 << 13
_SCOPE_SIGNAL = 1 << 1
_NO_LOG, _LOG_SINCE = 1, 7
SIGNALS_SINCE = 6
"""Landlock's version that also keeps signals within a domain (Linux 6.12)."""
_OLDEST = 2
"""In the version before it every domain refuses to move files between directories."""


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process; does nothing where there is no prctl."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3)


def landlock_version() -> int:
    """The version of Landlock in this kernel; 0: none that can confine."""
    found = _call(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION) if sys.platform == "linux" else 0
    return found if found >= _OLDEST else 0


def confine(version: int) -> None:
    """Put this process, which has one thread, into a Landlock domain of its own, for ever.

    It keeps its access to files and the network. It cannot get new privileges: sudo does not work.

    Args:
        version: as :func:`landlock_version` returns it; with 0 it only drops capabilities.

    Raises:
        OSError: the kernel refuses.
    """
    if sys.platform != "linux":
        return
    prctl(_NO_NEW_PRIVS, 1)
    _drop_capabilities()
    if not version:
        return
    if version >= SIGNALS_SINCE:
        _restrict(_made(struct.pack("QQQ", 0, 0, _SCOPE_SIGNAL)))
    else:
        # A domain needs a rule: no block devices. And files move between directories only where a rule allows it.
        ruleset = _made(struct.pack("Q", _MAKE_BLOCK | _REFER))
        root = os.open("/", os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", _REFER, root)
        _checked("landlock_add_rule", _call(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0))
        os.close(root)
        _restrict(ruleset)


def keep_signals(version: int) -> None:
    """Put this process into a domain that its signals do not leave: its descendants are in it. Nothing is logged.

    Args:
        version: as :func:`landlock_version` returns it, :data:`SIGNALS_SINCE` or more.

    Raises:
        OSError: the kernel refuses.
    """
    prctl(_NO_NEW_PRIVS, 1)
    _restrict(_made(struct.pack("QQQ", 0, 0, _SCOPE_SIGNAL)), _NO_LOG if version >= _LOG_SINCE else 0)


def _restrict(ruleset: int, flags: int = 0) -> None:
    _checked("landlock_restrict_self", _call(_RESTRICT_SELF, ruleset, flags))
    os.close(ruleset)


def _drop_capabilities() -> None:
    """With CAP_SYS_ADMIN and CAP_PERFMON the kernel shows the memory map and environment without asking Landlock."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, found = struct.pack("Ii", _CAPABILITIES_VERSION, 0), ctypes.create_string_buffer(24)
    _checked("capget", libc.capget(header, found))
    kept = sum(1 << number for number in _KEPT)
    masks = (kept & 0xFFFFFFFF,) * 3 + (kept >> 32,) * 3
    both = zip(struct.unpack("6I", found.raw), masks, strict=True)
    _checked("capset", libc.capset(header, struct.pack("6I", *(have & mask for have, mask in both))))


def _made(attributes: bytes) -> int:
    found = _call(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    return _checked("landlock_create_ruleset", found)


def _call(number: int, *arguments: object) -> int:
    return int(ctypes.CDLL(None, use_errno=True).syscall(number, *arguments))


def _checked(what: str, result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result
