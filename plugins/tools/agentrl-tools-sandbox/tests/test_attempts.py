"""Each attempt of hostile code in each boundary, and without one, where it must do what it wants."""

import asyncio
import importlib.util
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl_core.api import ToolContext, ToolError
from agentrl_tools_sandbox.config import PythonConfig
from agentrl_tools_sandbox.python_tool import PythonTool

SPEC = importlib.util.spec_from_file_location("sandbox_attempts", Path(__file__).with_name("attempts.py"))
attempts = sys.modules["sandbox_attempts"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(attempts)
SECRET = "the answer is 42"
ABSENT = ("ENOSYS", "EAFNOSUPPORT", "EPROTONOSUPPORT")
"""What a kernel says that was built without something."""
CASES = [pytest.param(attempt, id=attempt.id) for attempt in attempts.ATTEMPTS]


class World:
    """What is outside: files, a process, and sockets on which somebody listens."""

    def __init__(self, folder: Path) -> None:
        self.secret, self.visible = folder / "hidden" / "secret.txt", folder / "visible" / "data.txt"
        for path in (self.secret, self.visible):
            path.parent.mkdir()
            path.write_text(SECRET)
        os.setxattr(self.visible, "user.given", b"x")
        self.fifo = folder / "visible" / "channel"
        os.mkfifo(self.fifo)
        self.fifo.chmod(0o666)
        # As careless programs do.
        self.open_file = os.open(self.secret, os.O_RDWR)
        os.set_inheritable(self.open_file, True)
        self.victim = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        self.tcp, self.unix, self.abstract = (
            socket.socket(),
            socket.socket(socket.AF_UNIX),
            socket.socket(socket.AF_UNIX),
        )
        self.tcp.bind(("127.0.0.1", 0))
        self.unix.bind(str(folder / "s"))
        self.abstract.bind(f"\0agentrl-{os.getpid()}-{self.victim.pid}")
        for listening in (self.tcp, self.unix, self.abstract):
            listening.listen()
            listening.setblocking(False)
        self.before = self.state()

    def state(self) -> tuple[Any, ...]:
        """What no attempt may change."""
        pid = self.victim.pid
        limits = [resource.prlimit(pid, which) for which in (resource.RLIMIT_CPU, resource.RLIMIT_NOFILE)]
        scheduling = os.sched_getaffinity(pid), os.getpriority(os.PRIO_PROCESS, pid), os.sched_getscheduler(pid)
        files = []
        for path in (self.secret.parent, self.secret, self.visible.parent, self.visible):
            now = path.stat()
            names = sorted(os.listdir(path)) if path.is_dir() else path.read_text()
            files.append((now.st_mode, now.st_uid, now.st_mtime, now.st_nlink, os.listxattr(path), names))
        mine = [resource.getrlimit(which) for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_CPU)]
        return self.victim.poll(), limits, scheduling, files, mine

    def connected(self) -> bool:
        """Whether somebody has connected."""
        for listening in (self.tcp, self.unix, self.abstract):
            try:
                listening.accept()[0].close()
            except BlockingIOError:
                continue
            return True
        return False

    def script(self, attempt: attempts.Attempt) -> str:
        """The attempt as a program that prints how it went."""
        inode = os.fstat(self.open_file)
        names = {
            "SECRET": str(self.secret), "VISIBLE": str(self.visible), "SOCKET": self.unix.getsockname(),
            "ABSTRACT": self.abstract.getsockname(), "PORT": self.tcp.getsockname()[1], "PID": self.victim.pid,
            "PARENT": os.getpid(), "FIFO": str(self.fifo),
        }  # fmt: skip
        assigned = "".join(f"{name} = {value!r}\n" for name, value in names.items())
        assigned += f"INODE = os.stat_result(({inode.st_mode}, {inode.st_ino}, {inode.st_dev}, *[0] * 7))\n"
        return f"{attempts.PRELUDE}{assigned}print(attempt({attempt.code!r}))"

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        os.close(self.open_file)
        for listening in (self.tcp, self.unix, self.abstract):
            listening.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("world"))
    yield made
    made.close()


@pytest.fixture(scope="module", params=attempts.BOUNDARIES)
def confined_run(
    request: pytest.FixtureRequest, world: World, why_not: Callable[[str], str]
) -> Iterator[tuple[str, Callable[[attempts.Attempt], str]]]:
    """A boundary, and what runs an attempt in it: one sandbox for all with the same options."""
    if reason := why_not(request.param):
        pytest.skip(reason)
    os.environ["AGENTRL_TEST_SECRET"] = SECRET
    tools: dict[str, PythonTool] = {}

    def run(attempt: attempts.Attempt) -> str:
        key = repr(attempt.options)
        if key not in tools:
            options = {"boundary": request.param, "readable": [str(world.visible.parent)], **attempt.options}
            config = PythonConfig(keep_state=True, timeout=60.0, start_timeout=60.0, **options)
            tools[key] = PythonTool(config, ToolContext("python"))
        try:
            result = runner.run(tools[key].execute("a", {"code": world.script(attempt)}))
        except ToolError as error:
            return f"refused {error}"
        return result.response.text

    with asyncio.Runner() as runner:
        yield request.param, run
        for tool in tools.values():
            runner.run(tool.release("a"))
    del os.environ["AGENTRL_TEST_SECRET"]


@pytest.mark.parametrize("attempt", CASES)
def test_attempt(
    confined_run: tuple[str, Callable[[attempts.Attempt], str]], world: World, attempt: attempts.Attempt
) -> None:
    boundary, run = confined_run
    outcome = run(attempt)
    if boundary in attempt.not_held:
        assert outcome == "did", f"{boundary} does refuse it; take it out of not_held: {outcome}"
    else:
        assert outcome.startswith("refused") or "was ended" in outcome, outcome
        assert "NameError" not in outcome and "SyntaxError" not in outcome
    assert world.state() == world.before and not world.connected()


@pytest.fixture(scope="module")
def unconfined_run() -> Iterator[Callable[..., str]]:
    """Runs a program in a process of its own, below another one: an attempt may harm its parent."""
    with subprocess.Popen(
        [sys.executable, "-I", "-c", f"{attempts.PRELUDE}{FORKS}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "AGENTRL_TEST_SECRET": SECRET}, start_new_session=True,
    ) as forking:  # fmt: skip

        def run(script: str, folder: Path, descriptor: Path) -> str:
            forking.stdin.write(json.dumps([script, str(folder), str(descriptor)]).encode() + b"\n")
            forking.stdin.flush()
            return json.loads(forking.stdout.readline())

        yield run
        forking.stdin.close()


FORKS = """
import json
for line in sys.stdin:
    script, folder, path = json.loads(line)
    reading, writing = os.pipe()
    if os.fork() == 0:
        if os.fork() == 0:
            os.dup2(writing, 1)
            os.chdir(folder)
            os.open(path, os.O_RDWR)
            exec(script, globals())
            sys.stdout.flush()
            os._exit(0)
        os.wait()
        os._exit(0)
    os.close(writing)
    print(json.dumps(os.read(reading, 4096).decode()), flush=True)
    os.close(reading)
    os.wait()
"""


def is_root() -> bool:
    """Whether this process may do all that the attempts need: raw packets, devices, mounts, clocks, modules."""
    effective = int(Path("/proc/self/status").read_text().partition("CapEff:")[2].split()[0], 16)
    return all(effective >> bit & 1 for bit in (1, 13, 16, 17, 18, 20, 21, 22, 25, 27, 34))


@pytest.mark.parametrize("attempt", CASES)
def test_without_a_sandbox_it_does_what_it_wants(
    tmp_path_factory: pytest.TempPathFactory, unconfined_run: Callable[..., str], attempt: attempts.Attempt
) -> None:
    if attempt.root and not is_root():
        pytest.skip("needs root with its capabilities")
    outside = World(folder := tmp_path_factory.mktemp("w"))
    try:
        outcome = unconfined_run(outside.script(attempt), folder, outside.secret).strip()
        if outcome.startswith("refused") and any(f" {name} " in outcome for name in ABSENT):
            pytest.skip(f"this kernel does not have it: {outcome}")
        if platform.machine() != "x86_64" and "assert X86" in attempt.code:
            pytest.skip("this machine does not have it")
        assert outcome == "did"
    finally:
        outside.close()
        shutil.rmtree(folder, ignore_errors=True)


def test_what_other_sandboxes_did_not_hold_is_attempted_and_refused_by_each_boundary() -> None:
    refused = {attempt.id for attempt in attempts.ATTEMPTS if not attempt.not_held}
    assert {name for names in attempts.CVES.values() for name in names} <= refused


def test_the_docs_show_the_table() -> None:
    shown = attempts.DOCS.read_text().partition(attempts.BEGIN)[2].partition(attempts.END)[0]
    assert shown == attempts.table(), "run: python plugins/tools/agentrl-tools-sandbox/tests/attempts.py"
