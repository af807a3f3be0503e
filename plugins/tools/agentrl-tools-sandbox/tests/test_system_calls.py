"""The seccomp filter against other sources: libseccomp's numbers, and a slow reading of the program."""

import ctypes
import struct

import pytest

from agentrl_tools_sandbox.system_calls import CHECKS, MACHINES, numbers, program

ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
NEVER = (
    "io_uring_setup io_uring_enter io_uring_register bpf ptrace process_vm_readv process_vm_writev perf_event_open "
    "userfaultfd keyctl add_key request_key mount umount2 pivot_root chroot setns unshare clone3 open_by_handle_at "
    "name_to_handle_at kexec_load init_module finit_module memfd_create shmget semget msgget fanotify_init "
    "inotify_init1 seccomp reboot swapon quotactl acct settimeofday clock_settime kcmp pidfd_getfd "
    "process_madvise move_pages mbind"
).split()


def verdict(code: bytes, machine: str, number: int, arguments: tuple[int, ...] = ()) -> int:
    """What the kernel would return."""
    steps = list(struct.iter_unpack("=HBBI", code))
    data = struct.pack("=IIQ6Q", number, MACHINES[machine].audit, 0, *arguments, *[0] * (6 - len(arguments)))
    at = loaded = 0
    while True:
        operation, then, otherwise, value = steps[at]
        at += 1
        match operation:
            case 0x20:
                (loaded,) = struct.unpack_from("=I", data, value)
            case 0x54:
                loaded &= value
            case 0x15:
                at += then if loaded == value else otherwise
            case 0x35:
                at += then if loaded >= value else otherwise
            case 0x25:
                at += then if loaded > value else otherwise
            case 0x06:
                return value


@pytest.mark.parametrize("metadata", [True, False])
@pytest.mark.parametrize("machine", MACHINES)
def test_exactly_the_listed_calls_pass(machine, metadata) -> None:
    code, allowed = program(metadata, machine), numbers(machine, metadata)
    free = {number for name, number in allowed.items() if name not in CHECKS}
    checked = {allowed[name] for name in CHECKS if name in allowed}
    for number in range(600):
        # No check allows this value, in whichever argument.
        found = verdict(code, machine, number, (0x8002A000,) * 6)
        if number in checked:
            assert found == EPERM, number
        else:
            assert found == (ALLOW if number in free else ENOSYS if number >= 424 else EPERM), number
    assert verdict(code, machine, 0x40000000) == ENOSYS
    other = next(each for each in MACHINES if each != machine)
    assert verdict(code, other, allowed["getpid"]) == KILL
    assert ("chmod" in allowed or "fchmodat" in allowed) == metadata


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(
    "name, arguments, expected",
    [
        ("socket", (1, 1), ALLOW),
        ("socket", (1, 0x80801), ALLOW),
        ("socket", (1, 3), EPERM),
        ("socket", (2, 1, 262), EPERM),
        ("socket", ((1 << 32) + 2, 1), EPERM),
        ("clone", (0x3D0F00,), ALLOW),
        ("clone", (0x10000011,), EPERM),
        ("clone", (0x7C020000,), EPERM),
        ("prlimit64", (0, 7), ALLOW),
        ("prlimit64", (1, 7), EPERM),
        ("setpriority", (0, 0, 5), ALLOW),
        ("setpriority", (0, 9, 5), EPERM),
        ("ioctl", (0, 0x5401), ALLOW),
        ("ioctl", (0, 0x5412), EPERM),
        ("mknodat", (0, 0, 0o010644), ALLOW),
        ("mknodat", (0, 0, 0o020644), EPERM),
        ("fcntl", (0, 4), ALLOW),
        ("fcntl", (0, 1024), EPERM),
        ("prctl", (15,), ALLOW),
        ("prctl", (35,), EPERM),
        ("personality", (0x40000,), EPERM),
    ],
)
def test_arguments_are_checked(machine, name, arguments, expected) -> None:
    assert verdict(program(machine=machine), machine, numbers(machine)[name], arguments) == expected


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_are_those_of_libseccomp(machine) -> None:
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        pytest.skip("libseccomp is not installed")
    resolve = library.seccomp_syscall_resolve_name_arch
    resolve.argtypes = [ctypes.c_uint32, ctypes.c_char_p]
    for name, number in numbers(machine).items():
        assert resolve(MACHINES[machine].audit, name.encode()) == number, name
    allowed = set(numbers(machine).values())
    for name in NEVER:
        assert (number := resolve(MACHINES[machine].audit, name.encode())) > 0 and number not in allowed, name
