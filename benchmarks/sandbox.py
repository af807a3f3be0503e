"""Calls of the python tool in a sandbox: how long they take, and what they leave behind.

    python benchmarks/sandbox.py [--calls 1000] [--at-once 64] [--boundary auto] [--json FILE]

1. Fresh: every call starts a sandbox, ``--at-once`` calls at a time.
2. Kept: as many trajectories, each with its own sandbox, share the calls.

Then it counts the processes, directories, mounts and open files that are left. The exit code is 1 if there are any.
"""

import argparse
import asyncio
import gc
import os
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from _report import Figure, print_figures, write_json

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--boundary", choices=("auto", "sandlock", "bubblewrap"), default="auto")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures: list[Figure] = []
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
            what = "a sandbox per trajectory" if kept else "a sandbox per call"
            figures += [
                Figure(what, "calls per second", len(seconds) / total, "1/s"),
                Figure(what, "a call, median", 1000 * seconds[len(seconds) // 2], "ms"),
                Figure(what, "a call, longest", 1000 * seconds[-1], "ms"),
            ]
            left = left_behind(Path(name), mounts, files)
            figures += [Figure(what, f"{key} left behind", value, "", goal=0) for key, value in left.items()]
    title = f"{arguments.calls} calls, {arguments.at_once} at once, {tool._sandboxes.launch.boundary}"
    print_figures(title, figures)
    if arguments.json:
        write_json(arguments.json, figures)
    return int(any(figure.verdict == "miss" for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
