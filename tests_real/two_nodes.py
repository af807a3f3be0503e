"""Two nodes on one machine: Linux namespaces for what two hosts do not share, and a relay in the place of the network.

Each node has a network, a host name, processes, /tmp, /dev/shm and a home of its own. They share the installed packages
and the checkout, as two hosts with the same software do, and nothing that is written. There is no default route, and a
node's name resolves to the loopback, as on Debian. The relay carries IP packets between two TUN devices, late or not at
all: network emulation is missing in many kernels.

When the process that made a node dies, however it dies, the kernel ends every process of that node.
"""

import ctypes
import fcntl
import heapq
import os
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid")
HOME = "/tmp/home"
WORK = "/tmp/work"
DEVICE = "agentrl0"
MTU = 60_000
_SETUP = f"""
set -e
trap '' CHLD
mount --make-rprivate /
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /dev/shm
mkdir -p {HOME} {WORK}
printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n' "$0" > /tmp/hosts
mount --bind /tmp/hosts /etc/hosts
hostname "$0"
ip link set lo up
echo ready
exec sleep infinity
"""


def missing() -> str | None:
    """Why two nodes cannot be made on this machine; None if they can."""
    if sys.platform != "linux" or os.geteuid():
        return "namespaces need root on Linux"
    if lacking := [tool for tool in ("unshare", "nsenter", "setpriv", "ip") if shutil.which(tool) is None]:
        return f"no {', '.join(lacking)} here (Debian's util-linux and iproute2)"
    if not Path("/dev/net/tun").exists():
        return "no /dev/net/tun here"
    if ROOT.is_relative_to("/tmp"):
        return "the checkout is in /tmp, which each node has of its own"
    tried = subprocess.run(["unshare", *NAMESPACES, "--fork", "true"], capture_output=True, text=True, check=False)
    return f"this machine allows no namespaces: {tried.stderr.strip()}" if tried.returncode else None


class Node:
    """One node, from :func:`two_nodes`.

    Args:
        name: of the host.
        address: in the network between the nodes.
    """

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self._starter = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc",
             "sh", "-c", _SETUP, name],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._starter.stdout is not None
        assert self._starter.stdout.readline() == "ready\n", f"{name} was not set up"
        children = Path(f"/proc/{self._starter.pid}/task/{self._starter.pid}/children").read_text()
        self.init = int(children.split()[0])
        """The first process of the node, by its id here."""

    def path(self, path: str) -> Path:
        """Where a file of the node is for this process."""
        return Path(f"/proc/{self.init}/root") / path.lstrip("/")

    def start(self, command: str, **environment: str) -> "subprocess.Popen[str]":
        """Start a shell command on the node, its output in one pipe."""
        given = {
            "HOME": HOME, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1", "RAY_USAGE_STATS_ENABLED": "0", **environment,
        }  # fmt: skip
        return subprocess.Popen(
            ["nsenter", "--target", str(self.init), *NAMESPACES, "env", "-i", "-C", WORK,
             *(f"{name}={value}" for name, value in given.items()), "sh", "-c", command],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def run(self, command: str, timeout: float = 120.0, **environment: str) -> "subprocess.CompletedProcess[str]":
        """Run a shell command on the node to its end; TimeoutExpired ends it."""
        process = self.start(command, **environment)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(command, process.returncode, output)

    def processes(self, pattern: str) -> list[int]:
        """Processes of the node whose command line matches, by their ids here."""
        mine = os.stat(f"/proc/{self.init}/ns/pid").st_ino
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and os.stat(entry / "ns" / "pid").st_ino == mine:
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if re.search(pattern, words):
                        found.append(int(entry.name))
        return sorted(found)

    def close(self) -> None:
        """End the node with all its processes."""
        self._starter.kill()
        self._starter.wait()


class Relay:
    """Carries packets between two nodes, in a process of its own. Commands: ``delay SECONDS``, ``down`` and ``up``."""

    def __init__(self, one: Node, other: Node) -> None:
        places = [f"{node.init}={node.address}" for node in (one, other)]
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", sys.executable, __file__, *places],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", "the relay did not start"

    def tell(self, command: str) -> None:
        """Change what happens to packets that come from now on."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End the relay, and with it the devices."""
        self._process.kill()
        self._process.wait()


@contextmanager
def two_nodes() -> Iterator[tuple[Node, Node, Relay]]:
    """Two nodes and what is between them."""
    with ExitStack() as stack:
        nodes = []
        for number, name in enumerate(("head", "worker"), 1):
            nodes.append(Node(name, f"10.93.0.{number}"))
            stack.callback(nodes[-1].close)
        relay = Relay(*nodes)
        stack.callback(relay.close)
        yield nodes[0], nodes[1], relay


def _tun(init: int, address: str) -> int:
    """A TUN device with this address in a node's network."""
    with open(f"/proc/{init}/ns/net", encoding="ascii") as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    set_interface, tun, without_information = 0x400454CA, 0x0001, 0x1000
    fcntl.ioctl(device, set_interface, struct.pack("16sH22x", DEVICE.encode(), tun | without_information))
    for command in (f"addr add {address}/24 dev {DEVICE}", f"link set {DEVICE} mtu {MTU} txqueuelen 10000 up"):
        subprocess.run(["ip", *command.split()], check=True)
    return device


def _relay(places: Sequence[str]) -> None:
    ends = [_tun(int(init), address) for init, address in (place.split("=") for place in places)]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    delay, is_up, number = 0.0, True, 0
    waiting: list[tuple[float, int, int, bytes]] = []
    while True:
        patience = max(waiting[0][0] - time.monotonic(), 0.0) if waiting else None
        for source in select.select([*ends, sys.stdin], [], [], patience)[0]:
            if source is sys.stdin:
                word, *value = (sys.stdin.readline() or sys.exit(0)).split()
                delay, is_up = (float(value[0]), is_up) if word == "delay" else (delay, word == "up")
                continue
            with suppress(BlockingIOError):
                for _ in range(64):
                    packet = os.read(source, MTU + 100)
                    if is_up:
                        number += 1
                        target = ends[1 - ends.index(source)]
                        heapq.heappush(waiting, (time.monotonic() + delay, number, target, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            *_, target, packet = heapq.heappop(waiting)
            # A full queue loses packets, as a network does.
            with suppress(OSError):
                os.write(target, packet)


if __name__ == "__main__":
    _relay(sys.argv[1:])
