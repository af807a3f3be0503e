"""How long `agentrl --help` and `agentrl plugins list` take, next to importing torch.

    python benchmarks/startup.py [--distributions 500] [--repetitions 7] [--json FILE]

The commands run in turns, with every installed plugin and a folder of dummy distributions beside them.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from _report import Figure, report

AGENTRL = str(Path(sys.executable).parent / "agentrl")
TORCH = "import torch"
COMMANDS = {
    TORCH: [sys.executable, "-c", "import torch"],
    "agentrl --help": [AGENTRL, "--help"],
    "agentrl plugins list": [AGENTRL, "plugins", "list"],
    "agentrl plugins list --json": [AGENTRL, "plugins", "list", "--json"],
}
GOALS = {"agentrl --help": 0.35, "agentrl plugins list": 0.6}
SHARE_OF_TORCH = 0.25


def make_distributions(folder: Path, count: int) -> None:
    """Distributions as a package manager leaves them: metadata with dependencies, and a script."""
    requires = "".join(f"Requires-Dist: dummy-{number}>=1.0\n" for number in range(20))
    for number in range(count):
        info = folder / f"dummy_{number}-1.{number}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dummy-{number}\nVersion: 1.{number}\n{requires}")
        (info / "entry_points.txt").write_text(f"[console_scripts]\ndummy-{number} = dummy_{number}:main\n")
        (info / "RECORD").write_text(f"dummy_{number}/__init__.py,,\n")


@dataclass(frozen=True)
class Run:
    """Seconds of one start: by the clock, and of the CPU, which depends less on what else the machine does."""

    time: float
    cpu: float


def run(command: Sequence[str], environment: Mapping[str, str]) -> Run:
    """Runs a command to its end; with the processes that it waited for."""
    start = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return Run(time.perf_counter() - start, usage.ru_utime + usage.ru_stime)


def measure(environment: Mapping[str, str], repetitions: int) -> dict[str, list[Run]]:
    """Every command, one after the other in each repetition; a first one warms the caches of files."""
    runs: dict[str, list[Run]] = {name: [] for name in COMMANDS}
    for repetition in range(repetitions + 1):
        for name, command in COMMANDS.items():
            one = run(command, environment)
            if repetition:
                runs[name].append(one)
    return runs


def figures_of(runs: Mapping[str, Sequence[Run]]) -> list[Figure]:
    figures = []
    for name, of_command in runs.items():
        median_time = statistics.median(each.time for each in of_command)
        figures.append(Figure(name, "time, median", median_time, "s", goal=GOALS.get(name)))
        figures.append(Figure(name, "CPU, median", statistics.median(each.cpu for each in of_command), "s"))
        if name != TORCH:
            shares = [each.time / torch.time for each, torch in zip(of_command, runs[TORCH], strict=True)]
            goal = SHARE_OF_TORCH if name in GOALS else None
            figures.append(Figure(name, "share of importing torch", statistics.median(shares), "", goal=goal))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--distributions", type=int, default=500, help="dummy ones beside those that are installed")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_distributions(Path(folder), options.distributions)
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH", ""))))
        figures = figures_of(measure({**os.environ, "PYTHONPATH": path}, options.repetitions))
    report(f"Start-up beside {options.distributions} other distributions", figures, options.json)


if __name__ == "__main__":
    main()
