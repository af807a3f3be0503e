"""What hostile code tries, in each boundary that works on this machine."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl_core.api import PluginRequirementError, ToolContext, ToolError
from agentrl_tools_sandbox.boundary import Launch, choose
from agentrl_tools_sandbox.config import ShellConfig
from agentrl_tools_sandbox.launch import delete, size_of
from agentrl_tools_sandbox.sandbox import trial
from agentrl_tools_sandbox.shell_tool import ShellTool

SECRET = "the answer is 42"
TRY = """
def attempt(action):
    try:
        return f"did {action()!r}"
    except BaseException as error:
        return f"refused {type(error).__name__}"
"""


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "elsewhere" / "secret.txt"
    path.parent.mkdir()
    path.write_text(SECRET)
    return path


ACTIONS = [
    "open(SECRET).read()",
    "open(SECRET, 'w').write('x')",
    "__import__('os').listdir(__import__('os').path.dirname(SECRET))",
    "__import__('os').unlink(SECRET)",
    "__import__('os').rename(SECRET, 'mine')",
    "__import__('os').link(SECRET, 'mine')",
    "open('../' * 20 + SECRET).read()",
    "open(f'/proc/{PARENT}/environ', 'rb').read()",
    "open(f'/proc/{PARENT}/root' + SECRET).read()",
    "open('/etc/passwd').read()",
    "open('/dev/mem', 'rb')",
    "__import__('os').mkdir('/etc/agentrl-was-here')",
    "__import__('os').chroot('.')",
    "__import__('time').clock_settime(0, 0)",
    "__import__('resource').setrlimit(4, (1, 1)) or __import__('resource').setrlimit(4, (2, 2))",
    "__import__('subprocess').run(['cat', SECRET], check=True, capture_output=True).stdout",
]


def test_files_elsewhere_cannot_be_reached(confined, run_code, secret) -> None:
    actions = [each.replace("SECRET", repr(str(secret))).replace("PARENT", str(os.getpid())) for each in ACTIONS]
    texts = run_code(TRY, *(f"print(attempt(lambda: {action}))" for action in actions), **confined)
    for action, text in zip(actions, texts[1:], strict=True):
        assert text.startswith("refused"), (action, text)
    assert secret.read_text() == SECRET and not Path("/etc/agentrl-was-here").exists()


def test_symlinks_lead_nowhere(confined, run_code, secret, folder) -> None:
    code = f"{TRY}\nimport os\nos.symlink({str(secret)!r}, 'link')\nprint(attempt(lambda: open('link').read()))"
    assert run_code(code, **confined)[0].startswith("refused")

    async def main() -> None:
        tool = ShellTool(ShellConfig(**confined), ToolContext("shell"))
        try:
            await tool.execute("a", {"command": f"ln -s {secret} file; ln -s {secret.parent} dir"}, function="shell")
            calls = [
                ("read_file", {"path": "file"}),
                ("write_file", {"path": "file", "content": "x"}),
                ("replace_in_file", {"path": "dir/secret.txt", "old": "42", "new": "43"}),
                ("list_files", {"path": "dir"}),
            ]
            for function, arguments in calls:
                with pytest.raises(ToolError, match="PermissionError|FileNotFoundError|NotADirectoryError"):
                    await tool.execute("a", arguments, function=function)
        finally:
            await tool.release("a")

    asyncio.run(main())
    assert secret.read_text() == SECRET


def test_the_network_is_out_of_reach(confined, run_code, tmp_path) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    local = socket.socket(socket.AF_UNIX)
    local.bind(str(tmp_path / "socket"))
    local.listen()
    code = f"""{TRY}
import socket
def connect(family, address, kind=socket.SOCK_STREAM):
    with socket.socket(family, kind) as mine:
        mine.settimeout(2)
        mine.connect(address)
        return mine.send(b"x")
print(attempt(lambda: connect(socket.AF_INET, ("127.0.0.1", {listening.getsockname()[1]}))))
print(attempt(lambda: connect(socket.AF_INET, ("192.0.2.1", 80))))
print(attempt(lambda: connect(socket.AF_INET, ("192.0.2.1", 53), socket.SOCK_DGRAM)))
print(attempt(lambda: connect(socket.AF_UNIX, {str(tmp_path / "socket")!r})))
print(attempt(lambda: socket.getaddrinfo("example.com", 80)))
"""
    with listening, local:
        lines = run_code(code, **confined)[0].splitlines()
    assert len(lines) == 5 and all(line.startswith("refused") for line in lines), lines


def test_a_fork_bomb_is_bounded_and_ends_with_the_sandbox(confined, run_code) -> None:
    code = """
import os, time
children = 0
try:
    while children < 1000:
        if os.fork() == 0:
            time.sleep(1000)
        children += 1
except OSError as error:
    print(children, type(error).__name__)
"""
    (text,) = run_code(code, max_processes=8, **confined)
    number, error = text.split()
    assert int(number) < 8 and error == "BlockingIOError"


@pytest.mark.parametrize("code", ["x = bytearray(1 << 40)", "x = []\nwhile True: x.append(bytearray(1 << 20))"])
def test_memory_is_limited(confined, run_code, code) -> None:
    first, second = run_code(code, "print('well')", max_memory=128, **confined)
    assert "MemoryError" in first or "exceeded a limit of memory" in first
    assert second == "well"


def test_disk_space_is_limited(confined, run_code) -> None:
    code = "for number in range(100_000):\n    open(str(number), 'wb').write(bytes(1 << 20))"
    (text,) = run_code(code, max_disk=4, **confined)
    assert "No space left" in text or "exceeded a limit of memory or disk" in text


def test_an_endless_loop_is_stopped_and_keeps_its_state(confined, run_code) -> None:
    texts = run_code("x = 5", "while True: pass", "x", timeout=2.0, **confined)
    assert texts[1:] == ["[stopped after 2 s]", "5"]


def test_a_loop_that_ignores_the_deadline_is_killed(confined, run_code, monkeypatch) -> None:
    monkeypatch.setattr("agentrl_tools_sandbox.sandbox.GRACE", 0.5)
    code = "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass"
    texts = run_code(code, "1 + 1", timeout=2.0, **confined)
    assert texts[0] == (
        "The code was ended: it ran for more than 2 s and was stopped. Its variables and files are lost."
    )
    assert texts[1] == "2"


def test_signals_do_not_reach_other_processes(confined, run_code) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim:
        code = f"""{TRY}
import os, signal
for pid in ({victim.pid}, {os.getpid()}):
    print(attempt(lambda: os.kill(pid, signal.SIGTERM)), attempt(lambda: os.kill(pid, 0)))
print(attempt(lambda: os.kill(os.getppid(), signal.SIGSTOP)) if os.getppid() > 1 else "refused")
try:
    os.kill(-1, signal.SIGKILL)
except OSError:
    pass
"""
        lines = run_code(code, **confined)[0].splitlines()
        assert victim.poll() is None
        victim.send_signal(signal.SIGKILL)
    assert len(lines) == 3 and all(line.startswith("refused") for line in lines), lines


def test_environment_variables_stay_outside(confined, run_code, monkeypatch) -> None:
    monkeypatch.setenv("MY_SECRET_API_KEY", SECRET)
    code = """
import glob, os
print(dict(os.environ))
for path in glob.glob("/proc/[0-9]*/environ"):
    try:
        print(open(path).read())
    except OSError:
        pass
"""
    (text,) = run_code(code, **confined)
    assert "MY_SECRET" not in text and SECRET not in text and "HOME" in text


def test_background_processes_end_with_the_sandbox(confined, run_code) -> None:
    mark = f"agentrl-escape-{os.getpid()}"
    code = f"""
import os, subprocess, sys
for again in range(2):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(1000)", {mark!r}])
        os._exit(0)
"""
    run_code(code, **confined)
    assert mark not in processes()


def processes() -> str:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_text())
        except OSError:
            continue
    return "\n".join(found)


def test_forged_replies_do_not_reach_the_next_trajectory(confined, run_code) -> None:
    """Code may write to the guest's own pipe; that ends this sandbox, and nothing else."""
    code = """
import os
for number in range(3, 64):
    try:
        os.write(number, b"not json\\n" * 3)
    except OSError:
        pass
"""
    first, second = run_code(code, "print('well')", **confined)
    assert "was ended" in first
    assert second == "well"


def test_an_answer_that_is_too_long_does_not_delay_the_end(confined, run_code, monkeypatch) -> None:
    monkeypatch.setattr("agentrl_tools_sandbox.sandbox.STOP", 3600.0)
    code = """
import os
for number in range(3, 64):
    try:
        for _ in range(40):
            os.write(number, b"x" * 60_000)
    except OSError:
        pass
"""
    first, second = run_code(code, "print('well')", **confined)
    assert "was ended" in first and second == "well"


def test_files_too_deep_for_a_path_are_deleted(tmp_path) -> None:
    """Also where code took its own rights away: ``shutil.rmtree`` ends with a RecursionError."""
    folder = tmp_path / "folder"
    folder.mkdir()
    code = """
import os
for number in range(1500):
    os.mkdir("d" * 20)
    os.chdir("d" * 20)
    open("file", "w").close()
os.symlink("/", "link")
os.mkdir("closed")
open("closed/file", "w").close()
os.chmod("closed", 0)
"""
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)
    assert size_of(str(folder)) == sys.maxsize
    delete(str(folder))
    assert not folder.exists() and os.path.isdir("/usr")


def test_another_machine_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(
        PluginRequirementError, match="it is riscv64; the list of system calls is for x86_64 and aarch64"
    ):
        choose(ShellConfig(), trial)


def test_without_namespaces_the_weaker_boundary_is_named_and_not_chosen(monkeypatch) -> None:
    tried = []

    def refuse(launch: Launch) -> str:
        tried.append(launch.boundary)
        return "no user namespaces"

    with pytest.raises(
        PluginRequirementError, match="`boundary: landlock` is weaker; docs/tools.md lists what it holds"
    ):
        choose(ShellConfig(), refuse)
    assert tried and "landlock" not in tried
