"""What confines a sandbox: sandlock or bubblewrap, with namespaces and an allow-list of system calls, or less."""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agentrl_core.api import PluginRequirementError
from agentrl_tools_sandbox import system_calls
from agentrl_tools_sandbox.config import MIB, SandboxConfig
from agentrl_tools_sandbox.guest import OPEN_FILES

PACKAGE = Path(__file__).parent
SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
WORK = "/sandbox"
AUTOMATIC = ("sandlock", "bubblewrap")
"""Boundaries that ``auto`` tries, in this order."""
INSTALL = (
    "Install one of them: `pip install sandlock` (needs Linux 6.7 or newer with Landlock), or bubblewrap from your "
    "distribution (`apt-get install bubblewrap`). Both need user namespaces or root: a container must allow them, for "
    "example with `docker run --security-opt seccomp=unconfined --security-opt systempaths=unconfined`. Where it "
    "cannot, `boundary: landlock` is weaker; docs/tools.md lists what it holds. To run code with the rights of this "
    "process instead, set `unsafe: true`"
)
CAP_SYS_ADMIN = 21
_INTERPRETER = """
import json, sys
packages = [path for path in sys.path if path.endswith("-packages")]
print(json.dumps([sys.executable, sys.prefix, sys.base_prefix, *packages]))
"""


@dataclass(frozen=True)
class Launch:
    """How to start sandboxes: the arguments of ``launch.py`` for a directory and the read end of a pipe."""

    boundary: str
    specification: Callable[[str, int], dict[str, Any]]

    def command(self, folder: str, lifeline: int) -> list[str]:
        """The command that runs one sandbox."""
        spec = {**self.specification(folder, lifeline), "folder": folder, "lifeline": lifeline}
        return [sys.executable, "-I", "-S", str(PACKAGE / "launch.py"), json.dumps(spec)]


def choose(config: SandboxConfig, trial: Callable[[Launch], str]) -> Launch:
    """The first boundary that is allowed and works here.

    Args:
        config: the options of the tool.
        trial: runs an empty sandbox; returns why it failed, or "".

    Raises:
        PluginRequirementError: none works, and ``unsafe`` is not set. It says why, and what to install.
    """
    paths = interpreter(config.python or sys.executable)
    if config.unsafe:
        return _unconfined(config, paths)
    if platform.machine() not in system_calls.MACHINES:
        known = " and ".join(system_calls.MACHINES)
        raise PluginRequirementError(
            f"no sandbox works on this machine: it is {platform.machine()}; the list of system calls is for {known}. "
            "Use the tool remote_python, or set `unsafe: true` to run code with the rights of this process"
        )
    makers = {"sandlock": _sandlock, "bubblewrap": _bubblewrap, "landlock": _landlock}
    reasons = []
    for name in AUTOMATIC if config.boundary == "auto" else [config.boundary]:
        try:
            launch = makers[name](config, paths)
        except PluginRequirementError as error:
            reasons.append(f"{name}: {error}")
            continue
        if not (reason := trial(launch)):
            return launch
        reasons.append(f"{name}: {reason}")
    raise PluginRequirementError(f"no sandbox works on this machine. {'; '.join(reasons)}. {INSTALL}")


@lru_cache
def interpreter(python: str) -> tuple[str, ...]:
    """An interpreter, and the directories that it needs.

    Raises:
        PluginRequirementError: it cannot be run.
    """
    try:
        done = subprocess.run(
            [python, "-I", "-c", _INTERPRETER], stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise PluginRequirementError(f"python: {python} cannot be run: {error}") from error
    executable, *folders = json.loads(done.stdout.splitlines()[-1])
    return executable, *dict.fromkeys([*folders, str(Path(executable).resolve().parent)])


def guest_command(
    config: SandboxConfig, python: str, memory: int, processes: int, user: int = 0, allowed: bytes = b""
) -> list[str]:
    """The command inside the sandbox; limits of -1 are held by the boundary, ``allowed`` are its system calls."""
    limits = {"memory": memory, "processes": processes, "disk": config.max_disk * MIB, "user": user}
    settings = {"limits": limits, "max_output": config.max_output, "system_calls": allowed.hex()}
    return [python, "-I", "-c", (PACKAGE / "guest.py").read_text(), json.dumps(settings)]


def environment(work: str) -> dict[str, str]:
    """The variables in a sandbox: none of this process's."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": work, "TMPDIR": work, **threads}


def _readable(config: SandboxConfig, paths: Sequence[str]) -> list[str]:
    wanted = dict.fromkeys([*SYSTEM, *paths[1:], *config.readable])
    found = [path for path in wanted if os.path.exists(path)]
    return [path for path in found if not any(other in map(str, Path(path).parents) for other in found)]


def _sandlock(config: SandboxConfig, paths: Sequence[str], namespaces: bool = True) -> Launch:
    found = find_spec("sandlock")
    if found is None or found.origin is None:
        raise PluginRequirementError("the package is not installed")
    site = str(Path(found.origin).parent.parent)
    allowed = system_calls.program(metadata=namespaces)
    # sandlock counts what is mapped, not stacks that grow: those end at the limit of each process.
    command = guest_command(config, paths[0], config.max_memory * MIB, -1, allowed=allowed)
    readable = _readable(config, paths)

    def specification(folder: str, lifeline: int) -> dict[str, Any]:
        policy = {
            "fs_readable": [*readable, *DEVICES],
            "fs_writable": [folder, "/dev/null"],
            "clean_env": True,
            "env": environment(folder),
            "max_memory": config.max_memory * MIB,
            "max_processes": config.max_processes,
            "max_open_files": OPEN_FILES,
            "no_coredump": True,
            "cwd": folder,
        }
        spec = {"sandlock": site, "policy": policy, "command": command}
        if not namespaces:
            return spec | {"max_disk": config.max_disk * MIB}
        space = {"work": folder, "size": config.max_disk * MIB}
        return spec | {"namespaces": {**space, "readable": readable, "devices": DEVICES}}

    return Launch("sandlock" if namespaces else "landlock", specification)


def _landlock(config: SandboxConfig, paths: Sequence[str]) -> Launch:
    return _sandlock(config, paths, namespaces=False)


def _bubblewrap(config: SandboxConfig, paths: Sequence[str]) -> Launch:
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise PluginRequirementError("there is no command bwrap in PATH")
    size = str(config.max_disk * MIB)
    root = _may_unshare()
    # Without root a user namespace gives the right to make the others; code must not make more of them.
    users = [] if root else ["--unshare-user", "--disable-userns"]
    spaces = [f"--unshare-{name}" for name in ("ipc", "pid", "net", "uts", "cgroup-try")]
    arguments = [bwrap, *users, *spaces, "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    # Otherwise the first process is bubblewrap's, without limits, and code of the same user could change its memory.
    arguments += ["--as-pid-1"]
    if root:
        # For the change to another user, which drops them.
        arguments += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    for name, value in environment(WORK).items():
        arguments += ["--setenv", name, value]
    readable = _readable(config, paths)
    for parent in sorted(
        {str(parent) for path in readable for parent in Path(path).parents if parent != parent.parent}
    ):
        if not any(Path(parent).is_relative_to(path) for path in readable):
            # By default only root may enter it.
            arguments += ["--perms", "0755", "--dir", parent]
    for path in readable:
        arguments += ["--ro-bind", path, path]
    arguments += ["--proc", "/proc", "--dev", "/dev"]
    for path in ("/dev/shm", WORK):
        arguments += ["--perms", "1777", "--size", size, "--tmpfs", path]
    if not any(Path(path).is_relative_to("/tmp") for path in readable):
        arguments += ["--symlink", WORK, "/tmp"]
    # The rest is memory without a limit.
    arguments += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK]

    # Devices are the host's, and not read-only: whoever owns them could change their rights.
    metadata = root or os.geteuid() != 0

    def specification(folder: str, lifeline: int) -> dict[str, Any]:
        # Root is exempt from the limit on processes, which counts those of a user: an id that nobody else has.
        user = (1 << 24) + int.from_bytes(os.urandom(3), "big") if root else 0
        memory, processes = config.max_memory * MIB, config.max_processes
        command = guest_command(config, paths[0], memory, processes, user, system_calls.program(metadata))
        # Its own variable, which the code does not get, says to which sandbox a process belongs.
        return {"command": [*arguments, "--", *command], "env": {"AGENTRL_SANDBOX": folder}}

    return Launch("bubblewrap", specification)


def _may_unshare() -> bool:
    """Whether this is root with the right to make namespaces, which root in a container often lacks."""
    status = Path("/proc/self/status").read_text()
    effective = int(status.partition("CapEff:")[2].split()[0], 16)
    return os.geteuid() == 0 and bool(effective >> CAP_SYS_ADMIN & 1)


def _unconfined(config: SandboxConfig, paths: Sequence[str]) -> Launch:
    command = guest_command(config, paths[0], config.max_memory * MIB, -1)

    def specification(folder: str, lifeline: int) -> dict[str, Any]:
        return {"command": command, "env": environment(folder), "max_disk": config.max_disk * MIB}

    return Launch("none", specification)
