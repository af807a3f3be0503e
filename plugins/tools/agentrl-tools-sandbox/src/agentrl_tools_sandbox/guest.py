"""The program inside a sandbox: it runs code, shell commands and file operations, one request at a time.

It reads requests from stdin and writes replies to stdout, one JSON object a line. It uses the standard library only,
because its text is all that the sandbox gets. The boundary around it is what protects the host: code that runs here may
change this program, but that only changes what the model itself reads.
"""

import ast
import ctypes
import errno
import json
import linecache
import os
import resource
import signal
import stat
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO, TextIO

READ_LINES = 2000
LINUX_CAPABILITY_VERSION_3 = 0x20080522
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
KEPT_OUTPUT = 1 << 20
"""Bytes of earlier calls' output that stay in memory."""
QUEUED_SIGNALS = 1024
"""Of each process, timers included: the kernel counts those of a user's processes together."""
OPEN_FILES = 256
"""Of each process: pipes and sockets have buffers that no limit of memory counts."""


class Deadline(BaseException):
    """The time of a call is over."""


class Output:
    """What a call and its children write to stdout and stderr, in a file in memory.

    The guest makes one before its system calls are confined: no limit counts such files, so code cannot make more.
    """

    def __init__(self) -> None:
        self.file, self.start = os.memfd_create("output"), 0

    def clear(self) -> None:
        """Begin with the output of another call, behind that of earlier ones: sandlock asks its supervisor about each
        truncation, and about fstat."""
        self.start = os.lseek(self.file, 0, os.SEEK_END)
        if self.start > KEPT_OUTPUT:
            os.ftruncate(self.file, 0)
            self.start = os.lseek(self.file, 0, os.SEEK_SET)

    def text(self, limit: int) -> str:
        """The output; of a longer one the beginning and the end."""
        end = os.lseek(self.file, 0, os.SEEK_END)
        size = max(end - self.start, 0)
        if size <= limit:
            return os.pread(self.file, size, self.start).decode(errors="replace")
        head, tail = os.pread(self.file, limit // 2, self.start), os.pread(self.file, limit // 2, end - limit // 2)
        cut = f"\n[{size - 2 * (limit // 2)} bytes were cut]\n"
        return head.decode(errors="replace") + cut + tail.decode(errors="replace")


class Guest:
    """Serves the requests of one sandbox.

    Args:
        max_output: bytes of output that a reply may hold.
    """

    def __init__(self, max_output: int) -> None:
        self.max_output = max_output
        self.output = Output()
        self.pid = os.getpid()
        self.names: dict[str, Any] = {"__name__": "__main__"}

    def python(self, code: str, timeout: float) -> dict[str, Any]:
        """Execute code with the names that earlier code defined. The value of a last expression is printed."""
        output, failed, late = self.output, True, False
        output.clear()
        standard = os.dup(1), os.dup(2)
        os.dup2(output.file, 1)
        os.dup2(output.file, 2)
        streams = [open(number, "w", errors="backslashreplace", closefd=False) for number in (1, 2)]
        sys.stdout, sys.stderr = streams
        signal.signal(signal.SIGALRM, _raise_deadline)
        try:
            # Again and again, for code that catches everything.
            signal.setitimer(signal.ITIMER_REAL, timeout, 0.2)
            try:
                self._execute(code)
                failed = False
            except Deadline:
                late = True
            except BaseException as error:  # noqa: BLE001 - whatever the code raises is its result
                failed = _shown(error, streams[1])
        except Deadline:
            late = True
        except BaseException as error:  # noqa: BLE001 - what it raised is code, too
            streams[1].write(f"the exception cannot be shown: it raised {type(error)!r}\n")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            if os.getpid() != self.pid:
                os._exit(0)
        # Not what code put in their place.
        for stream in streams:
            with suppress(OSError, ValueError):
                stream.flush()
        for number, saved in enumerate(standard, start=1):
            os.dup2(saved, number)
            os.close(saved)
        return self._reply(failed=failed or late, late=late)

    def _execute(self, code: str) -> None:
        tree = ast.parse(code, "<code>")
        linecache.cache["<code>"] = (len(code), None, code.splitlines(keepends=True), "<code>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<code>", "exec"), self.names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<code>", "eval"), self.names)
            if value is not None:
                print(repr(value))  # noqa: T201 - to the model

    def shell(self, command: str, timeout: float) -> dict[str, Any]:
        """Run a shell command in the working directory."""
        output = self.output
        output.clear()
        child = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=output.file,
            stderr=output.file,
            start_new_session=True,
        )
        try:
            code, late = child.wait(timeout), False
        except subprocess.TimeoutExpired:
            code, late = 0, True
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return self._reply(failed=late or code != 0, late=late, code=code)

    def read(self, path: str, first_line: int, lines: int) -> dict[str, Any]:
        """Lines of a text file."""
        with _file(path, os.O_RDONLY) as file:
            size = os.fstat(file.fileno()).st_size
            for _ in range(first_line - 1):
                if not file.readline(self.max_output):
                    break
            data, count = b"", 0
            while count < min(lines, READ_LINES) and len(data) < self.max_output and (line := file.readline(4096)):
                data, count = data + line, count + line.endswith(b"\n")
            rest = size - file.tell()
        text = data.decode(errors="replace")
        return {"text": text + (f"\n[{rest} more bytes]" if rest > 0 and len(text) >= self.max_output else "")}

    def write(self, path: str, content: str) -> dict[str, Any]:
        """Create or replace a text file, with its directories."""
        if folder := os.path.dirname(path):
            os.makedirs(folder, exist_ok=True)
        data = content.encode()
        with _file(path, os.O_WRONLY | os.O_CREAT) as file:
            file.truncate()
            file.write(data)
        return {"text": f"wrote {len(data)} bytes to {path}"}

    def list(self, path: str) -> dict[str, Any]:
        """Names in a directory, directories with a slash."""
        names = sorted(entry.name + "/" * entry.is_dir() for entry in os.scandir(path))
        shown, length = 0, 0
        while shown < len(names) and length < self.max_output:
            length += len(names[shown]) + 1
            shown += 1
        more = [f"[{len(names) - shown} more]"] if shown < len(names) else []
        return {"text": "\n".join(names[:shown] + more) or "[empty]"}

    def replace(self, path: str, old: str, new: str) -> dict[str, Any]:
        """Replace a text that occurs once."""
        with _file(path, os.O_RDWR) as file:
            # Bytes: line ends stay what they are.
            text = file.read()
            if (count := text.count(old.encode()) if old else 0) != 1:
                raise ValueError(f"the old text occurs {count} times in {path}; it must occur exactly once")
            changed = text.replace(old.encode(), new.encode())
            file.seek(0)
            file.truncate()
            file.write(changed)
        return {"text": f"replaced 1 occurrence in {path}"}

    def _reply(self, **fields: Any) -> dict[str, Any]:
        return {"text": self.output.text(self.max_output), **fields}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request; what a file operation raises becomes ``error``."""
        operation: Callable[..., dict[str, Any]] = getattr(self, request.pop("do"))
        try:
            return operation(**request)
        except (OSError, ValueError, MemoryError, RecursionError) as error:
            return {"error": f"{type(error).__name__}: {error}"}


def _shown(error: BaseException, stream: TextIO) -> bool:
    """Write what code raised to a stream, as Python does; returns whether the code failed."""
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return False
        stream.write(f"SystemExit: {error.code}\n")
        return True
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != "<code>":
        frames = frames.tb_next
    stream.write("".join(traceback.format_exception(error.with_traceback(frames))))
    return True


def _file(path: str, flags: int) -> BinaryIO:
    """Open a regular file; what else may lie there could keep the guest waiting, or never end.

    Raises:
        OSError, ValueError: there is none, or it is something else.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        if kind == stat.S_IFDIR:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        raise ValueError(f"{path} is no regular file")
    return os.fdopen(descriptor, "rb" if flags == os.O_RDONLY else "r+b" if flags & os.O_RDWR else "wb")


def _raise_deadline(*_: Any) -> None:
    raise Deadline


def drop_capabilities() -> None:
    """Give up root's privileges for good: a boundary sets no_new_privs. Others have none."""
    header, none = struct.pack("=Ii", LINUX_CAPABILITY_VERSION_3, 0), bytes(24)
    ctypes.CDLL(None).capset(header, none)


def confine_system_calls(program: bytes) -> None:
    """Allow this process and all its children the system calls that a seccomp filter allows, for good.

    Raises:
        OSError: the kernel has no seccomp filters.
    """
    buffer = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of instructions of eight bytes, and where they are.
    description = struct.pack("HP", len(program) // 8, ctypes.addressof(buffer))
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, description, 0, 0):
        error = ctypes.get_errno()
        raise OSError(error, f"{os.strerror(error)}: the kernel refuses the seccomp filter")


def limit_resources(memory: int, processes: int, disk: int, user: int) -> None:
    """Limit this process and all its children.

    Args:
        memory, disk: bytes that a process may map, and that a file may have.
        processes: of the user that this sandbox runs as.
        user: id of a user that nobody else has; 0: stay who we are. Root is exempt from the limit on processes.
    """
    if user:
        with suppress(OSError):
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
    for which, limit in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, disk),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_SIGPENDING, QUEUED_SIGNALS),
    ):
        if limit >= 0:
            resource.setrlimit(which, (limit, limit))


def reap(child: int) -> None:
    """As the first process of a namespace: wait for orphans until a child ends, and end with all of them."""
    os.closerange(0, OPEN_FILES)
    while (ended := os.wait())[0] != child:
        pass
    os._exit(os.waitstatus_to_exitcode(ended[1]) & 0xFF)


def main() -> None:
    """Serve until stdin closes."""
    settings = json.loads(sys.argv[1])
    sys.argv[:] = [""]
    limit_resources(**settings["limits"])
    drop_capabilities()
    if os.getpid() == 1 and (child := os.fork()):
        confine_system_calls(bytes.fromhex(settings["system_calls"]))
        reap(child)
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    guest = Guest(settings["max_output"])
    if settings["system_calls"]:
        confine_system_calls(bytes.fromhex(settings["system_calls"]))
    reply: dict[str, Any] = {"ready": True}
    while True:
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()
        line = requests.readline()
        if not line:
            return
        start = time.monotonic()
        reply = guest.answer(json.loads(line))
        reply["seconds"] = time.monotonic() - start


if __name__ == "__main__":
    main()
