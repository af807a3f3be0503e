"""Thousands of trajectories in flight at once in one agent-loop worker: do they finish, and what memory do they take?

    OMP_NUM_THREADS=1 python benchmarks/in_flight.py [--sizes 2500 5000 10000] [--json FILE]

The parts are those of orchestration.py. The scripted engine answers nobody until all trajectories have asked for their
first turn, so that all are in flight together. Each size runs in a process of its own. Memory is the growth of the peak
over what the process held before the batch; the finished trajectories, which are returned all at once, are part of it.
"""

import argparse
import asyncio
import gc
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from _report import Figure, report
from orchestration import Benchmark, Case

from agentrl_core.api import TokenOutput
from agentrl_core.controller import LocalRuntime
from agentrl_testing.scripted_engine import ScriptedEngine

SAMPLES = 8
WORDS = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [2496, 5000, 10_000]
    parser.add_argument("--sizes", type=int, nargs="+", default=sizes, help="trajectories at once, multiples of 8")
    parser.add_argument("--vocabulary", type=int, default=16384, help="tokens")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    figures = (figure for size in options.sizes for figure in in_own_process(size, options.vocabulary))
    report("Trajectories in flight", figures, options.json)


def in_own_process(size: int, vocabulary: int) -> list[Figure]:
    """:func:`measure` in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (size, vocabulary))


def measure(size: int, vocabulary: int) -> list[Figure]:
    """Figures of one batch of ``size`` trajectories, a multiple of ``SAMPLES``.

    Raises:
        RuntimeError: a trajectory failed; so they do after the time limit of a turn if not all were in flight together.
    """
    hold_until_all_ask(size)
    with tempfile.TemporaryDirectory() as directory, LocalRuntime() as runtime:
        benchmark = Benchmark(Path(directory), vocabulary)
        manager = benchmark.manager(runtime, 0.0, size)
        prompts = benchmark.prompts(Case(size // SAMPLES, SAMPLES, WORDS), seed=0)
        gc.collect()
        before = resident_mib()
        wall, cpu = time.perf_counter(), time.process_time()
        results = manager.generate_sequences(prompts)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        leftover = len(runtime.run(_tasks()))
        manager.close()
    if failed := [result for result in results if result.reward is None]:
        raise RuntimeError(f"{len(failed)} of {size} trajectories have no reward; the first: {failed[0].error}")
    case = f"{len(results)} trajectories"
    return [
        Figure(case, "memory of a trajectory", (peak - before) * 1024 / len(results), "KiB"),
        Figure(case, "CPU per trajectory", cpu * 1000 / len(results), "ms"),
        Figure(case, "seconds", wall, "s"),
        Figure(case, "tasks left on the event loop", leftover, "", 0),
    ]


def hold_until_all_ask(size: int) -> None:
    """Let the engine answer its first ``size`` requests together."""
    generate = ScriptedEngine.generate
    all_ask = asyncio.Event()
    asked = 0

    async def held(self: ScriptedEngine, *args: Any, **kwargs: Any) -> TokenOutput:
        nonlocal asked
        asked += 1
        if asked == size:
            all_ask.set()
        await all_ask.wait()
        return await generate(self, *args, **kwargs)

    ScriptedEngine.generate = held  # type: ignore[method-assign]


async def _tasks() -> set[asyncio.Task[Any] | None]:
    return asyncio.all_tasks() - {asyncio.current_task()}


def resident_mib() -> float:
    """Resident memory of this process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


if __name__ == "__main__":
    main()
