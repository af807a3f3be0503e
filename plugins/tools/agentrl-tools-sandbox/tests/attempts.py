"""What hostile code attempts, and which boundary does not hold it. ``docs/tools.md`` shows this as a table.

Each code runs with the names of :data:`PRELUDE` and of a world that the test makes: ``SECRET``, a file out of sight;
``VISIBLE``, a file that may be read, ``FIFO`` beside it; ``PID``, another process; ``PARENT``, the process of the tool;
``PORT``, ``SOCKET`` and ``ABSTRACT``, where somebody listens. It did what it wanted if it ends; it was refused if it
raises. Without a sandbox each one does it, which a test shows: so none is refused because of a mistake in it.

    python attempts.py    writes the table to docs/tools.md
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BOUNDARIES = ("sandlock", "bubblewrap", "landlock")
DOCS = Path(__file__).parents[4] / "docs" / "tools.md"
BEGIN, END = "<!-- attempts: written by the sandbox's tests/attempts.py -->\n", "<!-- end of attempts -->\n"

PRELUDE = """
import ctypes, errno, fcntl, mmap, os, platform, resource, signal, socket, stat, struct, subprocess, sys, time
X86 = platform.machine() == "x86_64"
LIBC = ctypes.CDLL(None, use_errno=True)
BLANK = ctypes.create_string_buffer(4096)

def call(number, *arguments):
    "A system call; returns what the kernel does, and raises OSError."
    if number is None:
        raise NotImplementedError
    whole = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result = LIBC.syscall(ctypes.c_long(number), *whole)
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result

def reach(x86, arm, *arguments):
    "A system call with arguments that are wrong: whether the kernel looks at them."
    try:
        return call(x86 if X86 else arm, *arguments)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOSYS, errno.EACCES):
            raise

def connect(family, address, kind=socket.SOCK_STREAM, protocol=0):
    with socket.socket(family, kind, protocol) as mine:
        mine.settimeout(5)
        mine.connect(address)
        mine.send(b"x")

def listen(family, address, protocol=0):
    with socket.socket(family, socket.SOCK_STREAM, protocol) as mine:
        mine.bind(address)
        mine.listen()

def started(number, *arguments):
    "A system call that makes a process."
    if (child := call(number, *arguments)) == 0:
        os._exit(0)
    os.waitpid(child, 0x40000000)

def attempt(code):
    try:
        exec(code, globals())
    except BaseException as error:
        name = errno.errorcode.get(getattr(error, "errno", None), "")
        return f"refused {type(error).__name__} {name} {error}"
    return "did"
"""


@dataclass(frozen=True)
class Attempt:
    """One of them.

    Args:
        id: what it attempts, as in the table.
        code: how.
        topic: of the table.
        root: without a sandbox it needs root.
        not_held: boundaries in which it does what it wants.
        options: of the tool.
    """

    id: str
    code: str
    topic: str
    root: bool = False
    not_held: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


NO_NAMESPACE = ("landlock",)
RAW_CONNECT = """
descriptor = call(41 if X86 else 198, socket.AF_INET, socket.SOCK_STREAM, 0)
address = struct.pack("=H", socket.AF_INET) + struct.pack("!H4B8x", PORT, 127, 0, 0, 1)
call(42 if X86 else 203, descriptor, address, len(address))
"""
NETWORK = {
    "tcp-to-loopback": 'connect(socket.AF_INET, ("127.0.0.1", PORT))',
    "mptcp-to-loopback": 'connect(socket.AF_INET, ("127.0.0.1", PORT), protocol=262)',
    "tcp-by-raw-calls": RAW_CONNECT,
    "tcp-listens": 'listen(socket.AF_INET, ("0.0.0.0", 0))',
    "mptcp-listens": 'listen(socket.AF_INET, ("0.0.0.0", 0), 262)',
    "tcp-over-ipv6": "socket.socket(socket.AF_INET6)",
    "udp": 'connect(socket.AF_INET, ("127.0.0.1", PORT), socket.SOCK_DGRAM)',
    "ping": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "packets": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "netlink-routes": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).bind((0, 0))",
    "netlink-sockets-of-all": "socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 4)",
    "netlink-devices": "socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 15).bind((0, 1))",
    "vsock": "socket.socket(40, socket.SOCK_STREAM)",
    "alg": "socket.socket(38, socket.SOCK_SEQPACKET)",
    "xdp": "socket.socket(44, socket.SOCK_RAW)",
    "smc": "socket.socket(43, socket.SOCK_STREAM)",
    "unix-path": "connect(socket.AF_UNIX, SOCKET)",
    "unix-path-through-a-symlink": 'os.symlink(SOCKET, "way"); connect(socket.AF_UNIX, "way")',
    "unix-abstract": "connect(socket.AF_UNIX, ABSTRACT)",
    "interfaces": "assert len(socket.if_nameindex()) > 0",
}
# Every process that code sees is confined as the code is: by the same filter, and without capabilities.
FIRST = """
import re
status = open("/proc/1/status").read()
assert not re.search(r"Seccomp:\\s+2", status) or not re.search(r"CapEff:\\s+0+$", status, re.M)
"""
PROCESSES = {
    "kill": "os.kill(PID, signal.SIGKILL)",
    "kill-is-it-there": "os.kill(PID, 0)",
    "tgkill": "call(234 if X86 else 131, PID, PID, 9)",
    "tkill": "call(200 if X86 else 130, PID, 9)",
    "sigqueue": "reach(129, 138, PID, 9, 0); os.kill(PID, 0)",
    "pidfd-signal": "signal.pidfd_send_signal(os.pidfd_open(PID), 9)",
    "pidfd-getfd": "reach(438, 438, -1, 0, 0)",
    "signal-by-descriptor": "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, PID)",
    "prlimit-processor-time": "resource.prlimit(PID, resource.RLIMIT_CPU, (1, 1))",
    "prlimit-files-of-the-host": "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (10, 10))",
    "prlimit-reads": "resource.prlimit(PARENT, resource.RLIMIT_NOFILE)",
    "ptrace": "call(101 if X86 else 117, 16, PID, 0, 0)",
    "read-memory": "reach(310, 270, PID, None, 0, None, 0, 0)",
    "write-memory": "reach(311, 271, PID, None, 0, None, 0, 0)",
    "advise-memory": "reach(440, 440, -1, None, 0, 0, 0)",
    "release-memory": "reach(448, 448, -1, 0)",
    "migrate-pages": "reach(256, 238, PID, 0, None, None)",
    "compare": "reach(312, 272, PID, PID, 0, 0, 0)",
    "move-pages": "reach(279, 239, PID, 0, None, None, None, 0)",
    "processors": "os.sched_setaffinity(PID, {0})",
    "priority": "os.setpriority(os.PRIO_PROCESS, PID, 19)",
    "scheduler": "os.sched_setscheduler(PID, os.SCHED_BATCH, os.sched_param(0))",
    "io-priority": "call(251 if X86 else 30, 1, PID, 2 << 13)",
    "first-process": FIRST,
    "proc-list": 'assert str(PID) in os.listdir("/proc")',
    "proc-environment": 'open(f"/proc/{PARENT}/environ", "rb").read()',
    "proc-command": 'open(f"/proc/{PID}/cmdline").read()',
    "proc-memory": 'open(f"/proc/{PID}/mem", "r+b")',
    "proc-root": 'os.listdir(f"/proc/{PID}/root")',
    "proc-directory": 'os.stat(f"/proc/{PID}/cwd/.")',
    "proc-descriptors": 'os.listdir(f"/proc/{PARENT}/fd")',
    "proc-oom-score": 'open(f"/proc/{PID}/oom_score_adj", "w")',
}
MACHINE = {
    "load": "os.getloadavg()",
    "kernel": "os.uname()",
    "space": 'os.statvfs("/usr").f_bfree',
    "processors": 'assert "processor" in open("/proc/cpuinfo").read()',
    "kernel-command": 'open("/proc/cmdline").read()',
    "all-memory": 'assert os.sysconf("SC_PHYS_PAGES") > 0',
}
SEES_PROCESSES = {
    "proc-exists": 'os.stat(f"/proc/{PID}")',
    "group": "os.getpgid(PID)",
    "session": "os.getsid(PID)",
    "reads-processors": "os.sched_getaffinity(PID)",
    "reads-priority": "os.getpriority(os.PRIO_PROCESS, PID)",
}
OPEN_FILE = """
def same(number):
    try:
        return os.path.samestat(os.fstat(number), INODE)
    except OSError:
        return False

assert any(same(number) for number in range(3, 1024))
"""
FLAGS = """
descriptor = os.open(VISIBLE, os.O_RDONLY)
fcntl.ioctl(descriptor, 0x40086602, fcntl.ioctl(descriptor, 0x80086601, bytes(8)))
"""
HANDLE = """
handle = ctypes.create_string_buffer(struct.pack("I", 120), 200)
call(303 if X86 else 264, -100, VISIBLE.encode(), handle, BLANK, 0)
"""
FILES = {
    "read": "open(SECRET).read()",
    "read-by-dots": 'open("../" * 30 + SECRET).read()',
    "read-by-symlink": 'os.symlink(SECRET, "link1"); open("link1").read()',
    "read-by-program": 'subprocess.run(["cat", SECRET], check=True, capture_output=True)',
    "read-by-own-root": 'open("/proc/self/root" + SECRET).read()',
    "read-by-own-directory": 'open("/proc/self/cwd/" + "../" * 30 + SECRET).read()',
    "write": 'open(SECRET, "w").write("x")',
    "list": "os.listdir(os.path.dirname(SECRET))",
    "delete": "os.unlink(SECRET)",
    "rename": 'os.rename(SECRET, "mine1")',
    "link": 'os.link(SECRET, os.path.dirname(SECRET) + "/mine")',
    "passwords": 'open("/etc/passwd").read()',
    "visible-lock": "fcntl.flock(os.open(VISIBLE, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)",
    "neighbours": 'assert "hidden" in os.listdir(os.path.dirname(os.path.dirname(SECRET)))',
    "open-file-of-the-host": OPEN_FILE,
    "system-files": 'os.listdir("/sys/kernel")',
    "control-groups": 'os.listdir("/sys/fs/cgroup")',
    "visible-write": 'open(VISIBLE, "r+").write("x")',
    "visible-append": 'open(VISIBLE, "a").write("x")',
    "visible-truncate": "os.truncate(VISIBLE, 0)",
    "visible-delete": "os.unlink(VISIBLE)",
    "visible-rename": 'os.rename(VISIBLE, VISIBLE + "-mine")',
    "visible-create": 'open(os.path.dirname(VISIBLE) + "/new", "x")',
    "visible-directory": 'os.mkdir(os.path.dirname(VISIBLE) + "/new")',
    "visible-fifo": 'os.mkfifo(os.path.dirname(VISIBLE) + "/fifo")',
    "visible-symlink": 'os.symlink("a", os.path.dirname(VISIBLE) + "/symlink")',
    "visible-link": 'os.link(VISIBLE, os.path.dirname(VISIBLE) + "/hard")',
    "visible-link-out": 'os.link(VISIBLE, "hard"); open("hard", "r+").write("x")',
    "visible-rights": "os.chmod(VISIBLE, 0o777)",
    "visible-rights-by-descriptor": "os.fchmod(os.open(VISIBLE, os.O_RDONLY), 0o777)",
    "visible-rights-fchmodat2": "call(452, -100, VISIBLE.encode(), 0o777, 0)",
    "visible-owner": "os.chown(VISIBLE, os.getuid(), os.getgid())",
    "visible-owner-by-symlink": 'os.symlink(VISIBLE, "link2"); os.chown("link2", os.getuid(), os.getgid())',
    "visible-times": "os.utime(VISIBLE, (1, 1))",
    "visible-times-by-descriptor": "os.utime(os.open(VISIBLE, os.O_RDONLY), (1, 1))",
    "visible-attribute": 'os.setxattr(VISIBLE, "user.mine", b"x")',
    "visible-attribute-by-descriptor": 'os.setxattr(os.open(VISIBLE, os.O_RDONLY), "user.mine", b"x")',
    "visible-no-attribute": 'os.removexattr(VISIBLE, "user.given")',
    "visible-flags": FLAGS,
    "visible-fifo-write": "os.write(os.open(FIFO, os.O_RDWR | os.O_NONBLOCK), b'x')",
    "visible-lease": "fcntl.fcntl(os.open(VISIBLE, os.O_RDONLY), 1024, fcntl.F_RDLCK)",
    "visible-watch": "call(254 if X86 else 27, call(294 if X86 else 26, 0), VISIBLE.encode(), 2)",
    "visible-notify": "fcntl.fcntl(os.open(os.path.dirname(VISIBLE), os.O_RDONLY), 1026, 2)",
    "visible-handle": HANDLE,
    "open-by-handle": "reach(304, 265, -1, None, 0)",
    "fanotify": "reach(300, 262, 0x80000000, 0)",
    "library-write": 'open(os.__file__, "r+b")',
}
ROOT_FILES = {
    "device-rights": 'os.chmod("/dev/null", 0o666)',
    "device-owner": 'os.chown("/dev/null", 0, 0)',
    "device-attribute": 'os.utime("/dev/zero", (1, 1)); os.utime("/dev/zero")',
    "device": "os.mknod('device', stat.S_IFCHR | 0o666, os.makedev(1, 1))",
    "block-device": "os.mknod('disk', stat.S_IFBLK | 0o666, os.makedev(254, 0))",
    "program-write": 'open("/usr/bin/env", "r+b")',
    "kernel-log": 'open("/dev/kmsg")',
    "core-pattern": 'open("/proc/sys/kernel/core_pattern", "r+")',
    "drop-caches": 'open("/proc/sys/vm/drop_caches", "w")',
}
CLONE3 = """
wanted = struct.pack("=8Q", 0x10000000, 0, 0, 0, signal.SIGCHLD, 0, 0, 0)
started(435, ctypes.create_string_buffer(wanted, 64), 64)
"""
CAPABILITIES = """
data = ctypes.create_string_buffer(24)
call(125 if X86 else 90, struct.pack("Ii", 0x20080522, 0), data)
assert any(data.raw[:4])
"""
RIGHTS = {
    "new-privileges": "assert LIBC.prctl(39, 0, 0, 0, 0) == 0",
    "user-namespace": "call(272 if X86 else 97, 0x10000000)",
    "namespace-by-clone": "started(56 if X86 else 220, 0x10000000 | 17, 0, 0, 0, 0)",
    "namespace-by-clone3": CLONE3,
    "other-namespace": "reach(308, 268, -1, 0)",
    "no-random-addresses": "call(135 if X86 else 92, 0x40000)",
    "more-open-files": "resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 2048))",
    "larger-files": "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 40, 1 << 40))",
    "core-dumps": "resource.setrlimit(resource.RLIMIT_CORE, (1, 1))",
    "environment": 'assert "AGENTRL_TEST_SECRET" in os.environ',
    "terminal-input": "import pty, tty; tty.setraw(pty.openpty()[1]); fcntl.ioctl(pty.openpty()[1], 0x5412, b'x')",
    # Filters compare 32 or 64 bits of the command, of which the kernel reads 32.
    "terminal-input-of-64-bits": "reach(16, 29, os.pipe()[0], 1 << 32 | 0x5412, b'x')",
    "terminal-paste": "reach(16, 29, os.pipe()[0], 0x541C, b'\\3')",
    "own-filter": "reach(317, 277, 1, 0, None)",
}
ROOT_RIGHTS = {
    "capabilities": CAPABILITIES,
    "new-root": 'os.chroot(".")',
    "mount": "reach(165, 40, None, None, None, 0, None)",
    "unmount": "reach(166, 39, None, 0)",
    "pivot-root": "reach(155, 41, None, None)",
    "host-name": "reach(170, 161, None, -1)",
    "domain-name": "reach(171, 162, None, -1)",
    "clock": "reach(227, 112, 99, None)",
    "time-of-day": "reach(164, 170, None, None)",
    "module": "reach(175, 105, None, 0, None)",
    "module-from-file": "reach(313, 273, -1, None, 0)",
    "no-module": "reach(176, 106, None, 0)",
    "new-kernel": "reach(246, 104, 0, 1 << 20, None, 0xFFFF)",
    "reboot": "reach(169, 142, 0, 0, 0, None)",
    "swap": "reach(167, 224, None, 0)",
    "no-swap": "reach(168, 225, None)",
    "accounting": "reach(163, 89, 1)",
    "ports": "reach(173, None, 0xFFFFFFFF, 1, 1)",
    "port-level": "reach(172, None, 99)",
    "kernel-messages": "reach(103, 116, 3, BLANK, 100)",
}
KERNEL = {
    "io-uring": "reach(425, 425, 1, None)",
    "io-uring-enter": "reach(426, 426, -1, 0, 0, 0, None, 0)",
    "io-uring-register": "reach(427, 427, -1, 0, None, 0)",
    "userfaultfd": "call(323 if X86 else 282, 1)",
    "bpf": "reach(321, 280, 0, BLANK, 8)",
    "perf": "reach(298, 241, None, 0, -1, -1, 0)",
    "keyctl": "reach(250, 219, 0, -1, 0)",
    "add-key": "reach(248, 217, None, None, None, 0, 0)",
    "request-key": "reach(249, 218, None, None, None, 0)",
    "memory-file": "call(319 if X86 else 279, b'x', 0)",
    "secret-memory-file": "call(447, 0)",
    "shared-memory": "call(29 if X86 else 194, 0, 1 << 20, 0o1600)",
    "semaphores": "call(64 if X86 else 190, 0, 1, 0o1600)",
    "messages": "call(68 if X86 else 186, 0, 0o1600)",
    "message-queue": "reach(240, 180, None, 0, 0, None)",
    "async-io": "reach(206, 0, 1, None)",
    "memory-policy": "call(238 if X86 else 237, 0, None, 0)",
    "pages-from-user": "reach(278, 75, os.pipe()[1], None, 0, 0)",
    "new-mount-interface": "reach(430, 430, None, 0)",
    "mount-configuration": "reach(431, 431, -1, 0, None, None, 0)",
    "mount-tree": "reach(428, 428, -1, None, 0)",
    "mount-attributes": "reach(442, 442, -1, None, 0, None, 0)",
    "list-mounts": "reach(458, 458, None, None, 0, 0)",
    "quotas": "reach(179, 60, -1, None, 0, None)",
    "clock-details": "call(159 if X86 else 171, BLANK)",
    "file-attribute": "open('own', 'x').close(); os.setxattr('own', 'user.mine', b'x')",
    "socket-buffers": "socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)",
    "segments": "reach(154, None, 0, None, 0)",
    "page-order": "reach(216, 234, 0, 0, 0, 0, 0)",
    "sync-all-disks": "call(162 if X86 else 81)",
    "32-bit-call": """
assert X86
page = mmap.mmap(-1, 4096, prot=7)
page.write(b"\\x53\\xb8\\x14\\0\\0\\0\\xcd\\x80\\x5b\\xc3")
child = os.fork()
if child == 0:
    ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
""",
    "x32-call": "assert X86; call(0x40000000 + 39)",
}
FORK_BOMB = """
children = []
try:
    for number in range(64):
        children.append(os.fork())
        if children[-1] == 0:
            time.sleep(60)
            os._exit(0)
finally:
    for child in children:
        os.kill(child, 9)
        os.wait()
"""
# The limit is that of a user, whose other processes could queue no more: nobody may come near it.
SIGNALS = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
try:
    for number in range(2000):
        if LIBC.sigqueue(os.getpid(), signal.SIGRTMIN, None) < 0:
            raise OSError(ctypes.get_errno(), "")
finally:
    while signal.sigtimedwait([signal.SIGRTMIN], 0):
        pass
"""
# landlock looks at the directory four times a second.
WAIT = "time.sleep(1)"
MANY_FILES = f"for n in range(12): open(f'f{{n}}', 'wb').write(bytes(1 << 20))\n{WAIT}"
EMPTY_FILES = f"for n in range(3000): open(f'e{{n}}', 'x').close()\n{WAIT}"
DELETED_FILES = f"""
files = []
for number in range(12):
    files.append(open("deleted", "wb"))
    os.unlink("deleted")
    files[-1].write(bytes(1 << 20))
    files[-1].flush()
{WAIT}
files.clear()
"""
DEEP_FILES = f"""
for number in range(12):
    os.makedirs("/".join(["d" * 200] * 10))
    os.chdir("/".join(["d" * 200] * 10))
    open("file", "wb").write(bytes(1 << 20))
{WAIT}
"""
MAP = "page = mmap.mmap(-1, 700 << 20)\nfor n in range(0, 700 << 20, 4096): page[n] = 1"
STACK = """
unlimited = resource.getrlimit(resource.RLIMIT_STACK)[1]
resource.setrlimit(resource.RLIMIT_STACK, (unlimited, unlimited))
LIBC.mmap.restype, LIBC.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, *[ctypes.c_size_t] * 5]
top = 0x300000000000
assert LIBC.mmap(top, 4096, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x110, 2**64 - 1, 0) == top
child = os.fork()
if child == 0:
    for offset in range(0, 700 << 20, 4096):
        ctypes.memset(top - offset, 1, 1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
COPIES = """
page, children = bytearray(80 << 20), []
for number in range(6):
    children.append(os.fork())
    if children[-1] == 0:
        page[::4096] = bytes(80 << 8)
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
stopped = [os.waitpid(child, os.WUNTRACED)[1] for child in children]
for child in children:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
assert all(os.WIFSTOPPED(status) for status in stopped)
"""
RESOURCES = {
    "processes": (FORK_BOMB, {"max_processes": 8}),
    "queued-signals": (SIGNALS, {}),
    "memory": ("x = bytearray(700 << 20)", {"max_memory": 256}),
    "memory-by-map": (MAP, {"max_memory": 256}),
    "memory-in-pieces": ("x = [bytes(1 << 20) for n in range(700)]", {"max_memory": 256}),
    "stack-that-grows": (STACK, {"max_memory": 256}),
    "copies-after-fork": (COPIES, {"max_memory": 256}),
    "large-file": ("open('large', 'wb').write(bytes(12 << 20))", {"max_disk": 4}),
    "file-with-a-hole": ("os.truncate(os.open('hole', os.O_CREAT | os.O_RDWR), 1 << 33)", {"max_disk": 4}),
    "many-files": (MANY_FILES, {"max_disk": 4}),
    "deep-files": (DEEP_FILES, {"max_disk": 4}),
    "deleted-files": (DELETED_FILES, {"max_disk": 4}),
    "empty-files": (EMPTY_FILES, {"max_disk": 4}),
}
NEED_ROOT = (
    "ping", "packets", "userfaultfd", "xdp", "fanotify", "library-write", "terminal-input", "new-mount-interface",
)  # fmt: skip
TOPICS = {
    "uses the network": "network",
    "changes, signals or reads other processes": "processes",
    "learns whether a process exists": "process-exists",
    "reads or changes files outside": "files",
    "learns the machine's kernel, memory, load, space": "machine",
    "learns whether a file exists": "file-exists",
    "gains rights, or loses limits": "rights",
    "uses other interfaces of the kernel": "kernel",
    "exceeds limits": "limits",
}


def _all() -> Iterator[Attempt]:
    for topic, codes, root in (
        ("network", NETWORK, False),
        ("processes", PROCESSES, False),
        ("files", FILES, False),
        ("files", ROOT_FILES, True),
        ("rights", RIGHTS, False),
        ("rights", ROOT_RIGHTS, True),
        ("kernel", KERNEL, False),
    ):
        for name, code in codes.items():
            open_to = {"visible-lock": BOUNDARIES, "visible-fifo-write": ("bubblewrap",)}.get(name, ())
            yield Attempt(f"{topic}-{name}", code, topic, root or name in NEED_ROOT, not_held=open_to)
    for name, code in MACHINE.items():
        open_to = ("bubblewrap",) if name in ("kernel-command", "processors") else BOUNDARIES
        yield Attempt(f"machine-{name}", code, "machine", not_held=open_to)
    for name, code in SEES_PROCESSES.items():
        yield Attempt(f"process-exists-{name}", code, "process-exists", not_held=NO_NAMESPACE)
    yield Attempt("file-exists-stat", "os.stat(SECRET)", "file-exists", not_held=NO_NAMESPACE)
    yield Attempt("file-exists-access", "assert os.access(SECRET, os.F_OK)", "file-exists", not_held=NO_NAMESPACE)
    not_held = {"deleted-files": NO_NAMESPACE, "empty-files": ("bubblewrap",), "copies-after-fork": BOUNDARIES}
    for name, (code, options) in RESOURCES.items():
        yield Attempt(f"limits-{name}", code, "limits", not_held=not_held.get(name, ()), options=options)


ATTEMPTS = tuple(_all())
CVES = {
    "CVE-2016-8659": ("processes-first-process",),
    "CVE-2017-5226": ("rights-terminal-input",),
    "CVE-2018-16359": ("files-rename", "files-visible-rename"),
    "CVE-2018-19333": ("kernel-shared-memory",),
    "CVE-2019-10063": ("rights-terminal-input-of-64-bits",),
    "CVE-2020-5291": ("processes-ptrace", "rights-user-namespace"),
    "CVE-2021-41133": ("kernel-new-mount-interface", "kernel-mount-tree", "rights-namespace-by-clone3"),
    "CVE-2022-0185": ("kernel-mount-configuration",),
    "CVE-2022-0492": ("files-control-groups", "rights-mount"),
    "CVE-2023-28100": ("rights-terminal-paste",),
    "CVE-2024-21626": ("files-open-file-of-the-host",),
}
"""Attempts that other sandboxes once did not hold: bubblewrap, Flatpak, gVisor, runc and the kernel's own."""


def table() -> str:
    """What each boundary holds, for the docs."""
    lines = ["| hostile code | attempts | " + " | ".join(BOUNDARIES) + " |", "|---|---|" + "---|" * len(BOUNDARIES)]
    for title, topic in TOPICS.items():
        mine = [attempt for attempt in ATTEMPTS if attempt.topic == topic]
        cells = []
        for boundary in BOUNDARIES:
            names = [attempt.id.removeprefix(f"{topic}-") for attempt in mine if boundary in attempt.not_held]
            part = "" if len(names) == len(mine) else ": " + ", ".join(f"`{name}`" for name in names)
            cells.append(f"**not refused**{part}" if names else "refused")
        lines.append(f"| {title} | {len(mine)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    text = DOCS.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    DOCS.write_text(f"{before}{BEGIN}{table()}{END}{after}")


if __name__ == "__main__":
    main()
