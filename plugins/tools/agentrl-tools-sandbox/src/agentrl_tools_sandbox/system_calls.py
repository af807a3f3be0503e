"""The system calls that code in a sandbox may make, as a program for the kernel's seccomp filter.

It is an allow-list: what is not named here fails, also what a newer kernel adds. The names that are missing on purpose
are io_uring, bpf, ptrace, keys, mounts, namespaces, file handles, memory files, SysV IPC, inotify and their like.
"""

import platform
import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

# name:number on x86_64:number on aarch64; one number is both, "-" is a call that aarch64 does not have.
_ALLOWED = """
accept:43:202 accept4:288:242 access:21:- alarm:37:- arch_prctl:158:- bind:49:200 brk:12:214 capget:125:90
capset:126:91 chdir:80:49 clock_getres:229:114 clock_gettime:228:113 clock_nanosleep:230:115 close:3:57
close_range:436 connect:42:203 copy_file_range:326:285 creat:85:- dup:32:23 dup2:33:- dup3:292:24 epoll_create:213:-
epoll_create1:291:20 epoll_ctl:233:21 epoll_pwait:281:22 epoll_pwait2:441 epoll_wait:232:- eventfd:284:-
eventfd2:290:19 execve:59:221 execveat:322:281 exit:60:93 exit_group:231:94 faccessat:269:48 faccessat2:439
fadvise64:221:223 fallocate:285:47 fchdir:81:50 fdatasync:75:83 fgetxattr:193:10 flistxattr:196:13 flock:73:32
fork:57:- fstat:5:80 fstatfs:138:44 fsync:74:82 ftruncate:77:46 futex:202:98 futex_waitv:449 getcpu:309:168
getcwd:79:17 getdents:78:- getdents64:217:61 getegid:108:177 geteuid:107:175 getgid:104:176 getgroups:115:158
getitimer:36:102 getpeername:52:205 getpgid:121:155 getpgrp:111:- getpid:39:172 getppid:110:173 getpriority:140:141
getrandom:318:278 getresgid:120:150 getresuid:118:148 getrlimit:97:163 getrusage:98:165 getsid:124:156
getsockname:51:204 getsockopt:55:209 gettid:186:178 gettimeofday:96:169 getuid:102:174 getxattr:191:8 kill:62:129
lgetxattr:192:9 link:86:- linkat:265:37 listen:50:201 listxattr:194:11 llistxattr:195:12 lseek:8:62 lstat:6:-
madvise:28:233 membarrier:324:283 mincore:27:232 mkdir:83:- mkdirat:258:34 mlock:149:228 mlock2:325:284
mlockall:151:230 mmap:9:222 mprotect:10:226 mremap:25:216 msync:26:227 munlock:150:229 munlockall:152:231
munmap:11:215 nanosleep:35:101 newfstatat:262:79 open:2:- openat:257:56 openat2:437 pause:34:- pidfd_open:434
pidfd_send_signal:424 pipe:22:- pipe2:293:59 poll:7:- ppoll:271:73 pread64:17:67 preadv:295:69 preadv2:327:286
pselect6:270:72 pwrite64:18:68 pwritev:296:70 pwritev2:328:287 read:0:63 readahead:187:213 readlink:89:-
readlinkat:267:78 readv:19:65 recvfrom:45:207 recvmmsg:299:243 recvmsg:47:212 rename:82:- renameat:264:38
renameat2:316:276 restart_syscall:219:128 rmdir:84:- rseq:334:293 rt_sigaction:13:134 rt_sigpending:127:136
rt_sigprocmask:14:135 rt_sigqueueinfo:129:138 rt_sigreturn:15:139 rt_sigsuspend:130:133 rt_sigtimedwait:128:137
sched_get_priority_max:146:125 sched_get_priority_min:147:126 sched_getaffinity:204:123 sched_getattr:315:275
sched_getparam:143:121 sched_getscheduler:145:120 sched_rr_get_interval:148:127 sched_yield:24:124 select:23:-
sendfile:40:71 sendmmsg:307:269 sendmsg:46:211 sendto:44:206 set_robust_list:273:99 set_tid_address:218:96
setfsgid:123:152 setfsuid:122:151 setgid:106:144 setgroups:116:159 setitimer:38:103 setpgid:109:154 setregid:114:143
setresgid:119:149 setresuid:117:147 setreuid:113:145 setrlimit:160:164 setsid:112:157
setuid:105:146 shutdown:48:210 sigaltstack:131:132 signalfd:282:- signalfd4:289:74 splice:275:76 stat:4:-
statfs:137:43 statx:332:291 symlink:88:- symlinkat:266:36 sync_file_range:277:84 sysinfo:99:179 tee:276:77
tgkill:234:131 time:201:- timer_create:222:107 timer_delete:226:111 timer_getoverrun:225:109 timer_gettime:224:108
timer_settime:223:110 timerfd_create:283:85 timerfd_gettime:287:87 timerfd_settime:286:86 times:100:153
tkill:200:130 truncate:76:45 umask:95:166 uname:63:160 unlink:87:- unlinkat:263:35 vfork:58:- wait4:61:260
waitid:247:95 write:1:64 writev:20:66
"""
_CHECKED = """
clone:56:220 fcntl:72:25 ioctl:16:29 mknod:133:- mknodat:259:33 personality:135:92 prctl:157:167 prlimit64:302:261
sched_setaffinity:203:122 setpriority:141:140 socket:41:198 socketpair:53:199
setsockopt:54:208
"""
_METADATA = """
chmod:90:- chown:92:- fchmod:91:52 fchmodat:268:53 fchmodat2:452 fchown:93:55 fchownat:260:54
futimesat:261:- lchown:94:- utime:132:- utimensat:280:88 utimes:235:-
"""


class Check(NamedTuple):
    """An argument of a call, of which the bits in ``mask`` must be one of ``values``."""

    argument: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF


_FILE_TYPES = 0o170000
# A regular file (0 too), a FIFO, a socket; no device.
_NODES = (0, 0o100000, 0o010000, 0o140000)
_UNIX = (Check(0, (1,)), Check(1, (1, 2, 5), 0xF))
CHECKS: Mapping[str, tuple[Check, ...]] = {
    # No new namespace: NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET; not CLONE_PTRACE either.
    "clone": (Check(0, (0,), 0x7E022000),),
    # Descriptors, flags, locks, pipes, seals. No leases, notifications, or signals to others.
    "fcntl": (Check(1, (*range(8), 36, 37, 38, *range(1030, 1035))),),
    # Of terminals all but TIOCSTI and TIOCLINUX, which type into them; flags of descriptors; FICLONE.
    "ioctl": (
        Check(
            1,
            (*range(0x5401, 0x540C), 0x540E, 0x540F, 0x5410, 0x5411, 0x5413, 0x5414, 0x541B, 0x5421, 0x5422, 0x5429)
            + (0x5441, 0x5450, 0x5451, 0x5452, 0x80045430, 0x40045431, 0x40049409),
        ),
    ),
    "mknod": (Check(1, _NODES, _FILE_TYPES),),
    "mknodat": (Check(2, _NODES, _FILE_TYPES),),
    # To ask which it is, and the usual one.
    "personality": (Check(0, (0, 0xFFFFFFFF)),),
    # Parent-death signal, dumpable, name, timer slack, no_new_privs, child subreaper, huge pages, names of memory,
    # vector lengths and tagged addresses of aarch64; reading seccomp's and capabilities' state.
    "prctl": (Check(0, (1, 2, 3, 4, 15, 16, 21, 23, 29, 30, 36, 37, 38, 39, 41, 42, 50, 51, 56, 0x53564D41)),),
    # Of the calling process only.
    "prlimit64": (Check(0, (0,)),),
    "sched_setaffinity": (Check(0, (0,)),),
    "setpriority": (Check(0, (0,)), Check(1, (0,))),
    # No larger buffers: SO_SNDBUF and SO_RCVBUF are memory that no limit counts.
    "setsockopt": (Check(1, (1,)), Check(2, (2, 9, 13, 15, 16, 20, 21, 42))),
    "socket": _UNIX,
    "socketpair": _UNIX,
}


class Machine(NamedTuple):
    """What a filter must know of a machine: the number of its architecture, and its column in the tables."""

    audit: int
    column: int


MACHINES = {"x86_64": Machine(0xC000003E, 0), "aarch64": Machine(0xC00000B7, 1)}
X32 = 0x40000000
"""Numbers from here on are those of the x32 ABI, which would be a second door to every call."""
UNIFORM = 424
"""Calls from here on are newer than the oldest kernel in use. Programs ask whether they exist, so they get ENOSYS."""
_KILL, _ALLOW, _ERROR = 0x80000000, 0x7FFF0000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_LOAD, _AND, _EQUAL, _AT_LEAST, _ABOVE, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x25, 0x06


def numbers(machine: str, metadata: bool = True) -> dict[str, int]:
    """The allowed calls of a machine.

    Args:
        metadata: with those that change rights, owners, times and attributes of files. Landlock does not confine them.
    """
    column, found = MACHINES[machine].column, dict[str, int]()
    for entry in (_ALLOWED + _CHECKED + (_METADATA if metadata else "")).split():
        name, *columns = entry.split(":")
        if (number := columns[min(column, len(columns) - 1)]) != "-":
            found[name] = int(number)
    return found


def program(metadata: bool = True, machine: str = "") -> bytes:
    """The filter, as the kernel takes it: eight bytes an instruction. Arguments are those of :func:`numbers`.

    Raises:
        KeyError: there is no table for this machine.
    """
    machine = machine or platform.machine()
    allowed = numbers(machine, metadata)
    checked = {number: CHECKS[name] for name, number in allowed.items() if name in CHECKS}
    code = [
        # A program of another architecture has other numbers.
        _step(_LOAD, 4), _step(_EQUAL, MACHINES[machine].audit, 1, 0), _step(_RETURN, _KILL),
        _step(_LOAD, 0), _step(_AT_LEAST, X32, 0, 1), _step(_RETURN, _ERROR | _ENOSYS),
    ]  # fmt: skip
    for number, checks in checked.items():
        block = [step for check in checks for step in _checked(check)] + [_step(_RETURN, _ALLOW)]
        code += [_step(_EQUAL, number, 0, len(block)), *block]
    for first, last in _ranges(set(allowed.values()) - set(checked)):
        # Ranges rise: below one that was not passed is a gap.
        refusal = [_step(_AT_LEAST, UNIFORM, 0, 1), _step(_RETURN, _ERROR | _ENOSYS), _step(_RETURN, _ERROR | _EPERM)]
        block = [_step(_AT_LEAST, first, 0, 1), _step(_RETURN, _ALLOW), *refusal]
        code += [_step(_ABOVE, last, len(block), 0), *block]
    # The last range ends far above UNIFORM.
    return b"".join([*code, _step(_RETURN, _ERROR | _ENOSYS)])


def _checked(check: Check) -> Iterator[bytes]:
    """Go on if the argument is allowed; otherwise EPERM."""
    yield _step(_LOAD, 16 + 8 * check.argument)
    if check.mask != 0xFFFFFFFF:
        yield _step(_AND, check.mask)
    for left, value in zip(range(len(check.values), 0, -1), check.values, strict=True):
        yield _step(_EQUAL, value, left, 0)
    yield _step(_RETURN, _ERROR | _EPERM)


def _ranges(wanted: set[int]) -> Iterator[tuple[int, int]]:
    first = last = -1
    for number in sorted(wanted):
        if first >= 0 and number > last + 1:
            yield first, last
            first = -1
        first, last = (number if first < 0 else first), number
    yield first, last


def _step(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("=HBBI", code, then, otherwise, value)
