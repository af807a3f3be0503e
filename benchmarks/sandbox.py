"""Calls of the python tool in a sandbox: how long they take, and what they leave behind.

    python benchmarks/sandbox.py [--calls 1000] [--at-once 64] [--boundary auto] [--json FILE]
    python benchmarks/sandbox.py --against CHECKOUT [--calls 100] [--boundary auto] [--json FILE]

1. Fresh: every call starts a sandbox, ``--at-once`` calls at a time.
2. Kept: as many trajectories, each with its own sandbox, share the calls.

Then it counts the processes, directories, mounts and open files that are left. The exit code is 1 if there are any.

With ``--against`` another checkout that has its ``.venv`` takes turns with this one, call by call. The exit code is 1
if this one's calls take over 10% longer: the median of the ratios of all pairs.
"""

import argparse
import asyncio
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from _report import Figure, report

from agentrl_core.api import ToolContext
from agentrl_tools_sandbox.config import PythonConfig
from agentrl_tools_sandbox.python_tool import PythonTool


async def calls(tool: PythonTool, count: int, at_once: int) -> list[float]:
    """Seconds of each call; ``at_once`` trajectories share them."""
    left, seconds = iter(range(count)), list[float]()

    async def trajectory(name: str) -> None:
        for number in left:
            start = time.perf_counter()
            result = await tool.execute(name, {"code": f"print({number} + 1)"})
            assert result.response.text == str(number + 1), result.response.text
            seconds.append(time.perf_counter() - start)
        await tool.release(name)

    await asyncio.gather(*(trajectory(str(number)) for number in range(at_once)))
    return sorted(seconds)


def left_behind(folder: Path, mounts: str, files: int) -> dict[str, int]:
    """What is there now and was not before."""
    gc.collect()
    processes = 0
    for path in Path("/proc").glob("[0-9]*"):
        # The launcher has the directory in its arguments, what it starts in a variable.
        with suppress(OSError):
            processes += bytes(folder) in (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
    return {
        "processes": processes,
        "directories": len(list(folder.iterdir())),
        "mounts": int(Path("/proc/self/mountinfo").read_text() != mounts),
        "open files": max(len(os.listdir("/proc/self/fd")) - files, 0),
    }


def serve(boundary: str, kept: bool) -> None:
    """Make one call for each line of stdin, and print its seconds."""

    async def answer() -> None:
        tool = PythonTool(PythonConfig(boundary=boundary, keep_state=kept, start_timeout=600.0), ToolContext("python"))
        for _ in sys.stdin:
            sys.stdout.write(f"{(await calls(tool, 1, 1))[0] if not kept else await asked(tool)}\n")
            sys.stdout.flush()
        await tool.release("kept")

    async def asked(tool: PythonTool) -> float:
        start = time.perf_counter()
        await tool.execute("kept", {"code": "print(1 + 1)"})
        return time.perf_counter() - start

    asyncio.run(answer())


def compare(other: Path, boundary: str, count: int) -> Iterator[Figure]:
    """This checkout's calls and those of another one in turns."""
    for kept in (False, True):
        arguments = [__file__, "--boundary", boundary, "--serve", "kept" if kept else "fresh"]
        with (
            subprocess.Popen([sys.executable, *arguments], text=True, stdin=-1, stdout=-1) as mine,
            subprocess.Popen([other / ".venv/bin/python", *arguments], text=True, stdin=-1, stdout=-1) as theirs,
        ):
            pairs = []
            for number in range(count + 2):
                seconds = {}
                for each in (mine, theirs) if number % 2 else (theirs, mine):
                    assert each.stdin is not None and each.stdout is not None
                    each.stdin.write("\n")
                    each.stdin.flush()
                    seconds[each] = float(each.stdout.readline())
                pairs.append((seconds[mine], seconds[theirs]))
        # The first ones choose the boundary and start the sandbox that is kept.
        now, before = zip(*pairs[2:], strict=True)
        ratio = statistics.median(a / b for a, b in pairs[2:])
        what = "in a sandbox of the trajectory" if kept else "a sandbox per call"
        yield Figure(what, "a call here, median", 1000 * statistics.median(now), "ms")
        yield Figure(what, "a call there, median", 1000 * statistics.median(before), "ms")
        yield Figure(what, "ratio, median of pairs", ratio, "", goal=1.1)


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    """Both parts."""
    with tempfile.TemporaryDirectory(prefix="agentrl-benchmark-") as name:
        tempfile.tempdir = name
        for kept in (False, True):
            config = PythonConfig(boundary=arguments.boundary, keep_state=kept, start_timeout=600.0)
            tool = PythonTool(config, ToolContext("python"))
            asyncio.run(calls(tool, 2, 1))
            mounts, files = Path("/proc/self/mountinfo").read_text(), len(os.listdir("/proc/self/fd"))
            start = time.perf_counter()
            seconds = asyncio.run(calls(tool, arguments.calls, arguments.at_once))
            total = time.perf_counter() - start
            left = left_behind(Path(name), mounts, files)
            kind = "a sandbox per trajectory" if kept else "a sandbox per call"
            what = f"{kind}, {tool._sandboxes.launch.boundary}"
            yield Figure(what, "calls per second", len(seconds) / total, "1/s")
            yield Figure(what, "a call, median", 1000 * seconds[len(seconds) // 2], "ms")
            yield Figure(what, "a call, longest", 1000 * seconds[-1], "ms")
            yield from (Figure(what, f"{key} left behind", value, "", goal=0) for key, value in left.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--boundary", choices=("auto", "sandlock", "bubblewrap", "landlock"), default="auto")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--serve", choices=("fresh", "kept"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.boundary, arguments.serve == "kept")
        return 0
    if arguments.against:
        title = f"{arguments.calls} pairs of calls, {arguments.boundary}"
        found = compare(arguments.against.absolute(), arguments.boundary, arguments.calls)
    else:
        title = f"{arguments.calls} calls, {arguments.at_once} at once, boundary {arguments.boundary}"
        found = measure(arguments)
    figures = report(title, found, arguments.json)
    return int(any(figure.verdict == "miss" for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
