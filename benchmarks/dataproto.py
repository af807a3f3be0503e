"""How close the batch protocol and the worker groups are to Ray and torch without them.

    OMP_NUM_THREADS=1 python benchmarks/dataproto.py [--output DIR] [--peer MODULE]

A batch of 1024 rows with five int64 tensors (96 MiB) and four object columns; two workers on this machine. Every case
is timed in turns with the same work done by hand (numpy through Ray, plain torch); what is judged is the ratio of the
medians. ``--peer`` names a module with the names of ``_own_dataproto.py``, which is timed in the same turns.
"""

import argparse
import gc
import importlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import _own_dataproto
import numpy as np
import ray
import torch
from _memory import PeakMemory
from _report import Figure, report, write_markdown

from agentrl_core.controller import make_runtime

MIB = 2**20
TENSORS = 5
PUT_GOAL = 1.4
ECHO_GOAL = 1.5
CALLS_GOAL = 0.85
ROWS_GOAL = 1.1
MEMORY_GOAL = 3.2

Action = Callable[[], object]


def main() -> None:
    """Runs all cases."""
    args = _arguments()
    modules = {"agentrl": _own_dataproto, **({args.peer: importlib.import_module(args.peer)} if args.peer else {})}
    with make_runtime("ray", num_cpus=8):
        bench = Bench(modules, args.rows, args.mib, args.repetitions, args.calls)
        title = f"DataProto: {args.rows} rows, {TENSORS} int64 tensors of together {args.mib:g} MiB, 2 workers"
        if args.output:
            args.output.mkdir(parents=True, exist_ok=True)
        parts = (
            bench.memory, bench.warm_store, bench.put_and_get, bench.echo, bench.calls_per_second, bench.row_operations,
        )  # fmt: skip
        measured = (figure for part in parts for figure in part())
        figures = report(title, measured, args.output / "dataproto.json" if args.output else None)
    if args.output:
        write_markdown(args.output / "dataproto.md", title, "python benchmarks/dataproto.py", figures)


class Bench:
    """The batch, the workers and the cases."""

    def __init__(self, modules: dict[str, ModuleType], rows: int, mib: float, repetitions: int, calls: int) -> None:
        self._modules: dict[str, Any] = dict(modules)
        self._repetitions = repetitions
        self._calls = calls
        width = max(round(mib * MIB / rows / TENSORS / 8), 1)
        self._tensors = {f"t{i}": torch.arange(rows * width).reshape(rows, width) + i for i in range(TENSORS)}
        self._objects = {
            "prompt": [f"What is {row} + {row}?" for row in range(rows)],
            "uid": [f"{row:032x}" for row in range(rows)],
            "messages": [[{"role": "user", "content": str(row)}] for row in range(rows)],
            "extra_info": [{"index": row, "split": "train"} for row in range(rows)],
        }
        self._bytes = sum(tensor.nbytes for tensor in self._tensors.values())
        self._groups = {name: _group(module) for name, module in self._modules.items()}
        self._actors = [ray.remote(RawWorker).options(num_cpus=0).remote() for _ in range(2)]

    def memory(self) -> list[Figure]:
        """How much more memory an echo takes at its peak; before anything else has grown the store."""
        figures = []
        for name, module in self._modules.items():
            batch = self._batches()[name]
            group = self._groups[name]
            group.echo(batch[:2])
            # The store's file is there once something large is; it is given back before the measurement.
            ray.get(ray.put(np.ones(MIB)))
            gc.collect()
            pids = [os.getpid(), *group.pid()]
            with PeakMemory(pids) as memory:
                out = group.echo(batch)
            del out
            goal = MEMORY_GOAL if module is _own_dataproto else None
            figures.append(Figure(f"echo, memory, {name}", "growth / batch", memory.growth / self._bytes, "", goal))
        return figures

    def warm_store(self) -> list[Figure]:
        """Touches as much of the store as the cases need, and keeps its end, so that no case pays for new pages."""
        blocks = [ray.put(np.zeros(self._bytes // 8 + MIB)) for _ in range(6)]
        self._end_of_store = ray.put(np.zeros(MIB))
        del blocks
        return []

    def put_and_get(self) -> list[Figure]:
        """The batch into the object store and out again."""
        arrays = {name: tensor.numpy() for name, tensor in self._tensors.items()}
        actions: dict[str, Action] = {
            name: lambda batch=batch: ray.get(ray.put(batch)) for name, batch in self._batches().items()
        }
        return self._pairs("put + get", {"numpy": lambda: ray.get(ray.put(arrays)), **actions}, PUT_GOAL)

    def echo(self) -> list[Figure]:
        """A call of both workers with half of the batch each, and the results put together."""
        half = len(self._objects["uid"]) // 2
        first = {name: tensor[:half].numpy() for name, tensor in self._tensors.items()}
        second = {name: tensor[half:].numpy() for name, tensor in self._tensors.items()}
        left, right = self._actors

        def by_hand() -> object:
            parts = ray.get([left.echo.remote(first), right.echo.remote(second)])
            return {name: np.concatenate([part[name] for part in parts]) for name in first}

        actions: dict[str, Action] = {
            name: lambda name=name, batch=batch: self._groups[name].echo(batch)
            for name, batch in self._batches().items()
        }
        return self._pairs("DP_COMPUTE_PROTO echo", {"numpy, by hand": by_hand, **actions}, ECHO_GOAL)

    def calls_per_second(self) -> list[Figure]:
        """Calls of both workers with next to no data."""
        left, right = self._actors
        small = torch.arange(256).reshape(16, 16)
        halves = [small[:8].numpy(), small[8:].numpy()]

        def raw_echo() -> object:
            return np.concatenate(ray.get([left.echo.remote(halves[0]), right.echo.remote(halves[1])]))

        def raw_ping() -> object:
            return ray.get([left.ping.remote(), right.ping.remote()])

        echoes: dict[str, Action] = {}
        pings: dict[str, Action] = {}
        for name, module in self._modules.items():
            batch = module.DataProto.from_dict({"x": small})
            echoes[name] = lambda name=name, batch=batch: self._groups[name].echo(batch)
            pings[name] = self._groups[name].ping
        return [
            *self._rates("echo of 16×16", {"two actors, by hand": raw_echo, **echoes}),
            *self._rates("ping", {"two actors, by hand": raw_ping, **pings}),
        ]

    def row_operations(self) -> list[Figure]:
        """Operations of one process against torch on the same tensors."""
        rows = len(self._objects["uid"])
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))[: rows // 2]
        pieces = [tensor.chunk(8) for tensor in self._tensors.values()]
        batches = self._batches()
        chunks = {name: batch.chunk(8) for name, batch in batches.items()}
        return [
            *self._pairs(
                "concat(8)",
                {
                    "torch": lambda: [torch.cat(parts) for parts in pieces],
                    **{name: lambda n=name: self._modules[n].DataProto.concat(chunks[n]) for name in batches},
                },
                ROWS_GOAL,
            ),
            *self._pairs(
                "repeat ×2",
                {
                    "torch": lambda: [tensor.repeat_interleave(2, dim=0) for tensor in self._tensors.values()],
                    **{name: lambda b=batch: b.repeat(2, interleave=True) for name, batch in batches.items()},
                },
                ROWS_GOAL,
            ),
            *self._pairs(
                "select half",
                {
                    "torch": lambda: [tensor.index_select(0, order) for tensor in self._tensors.values()],
                    **{name: lambda b=batch: b.select_idxs(order) for name, batch in batches.items()},
                },
                ROWS_GOAL,
            ),
        ]

    def _batches(self) -> dict[str, Any]:
        return {
            name: module.DataProto.from_dict(self._tensors, {k: _object_array(v) for k, v in self._objects.items()})
            for name, module in self._modules.items()
        }

    def _pairs(self, case: str, actions: dict[str, Action], goal: float) -> list[Figure]:
        times = _interleaved(actions, self._repetitions, 1)
        medians = {name: statistics.median(values) for name, values in times.items()}
        baseline = next(iter(actions))
        figures = [Figure(case, name, seconds * 1e3, "ms") for name, seconds in medians.items()]
        for name in self._modules:
            own_goal = goal if self._modules[name] is _own_dataproto else None
            figures.append(Figure(case, f"{name} / {baseline}", medians[name] / medians[baseline], "", own_goal))
        return figures

    def _rates(self, case: str, actions: dict[str, Action]) -> list[Figure]:
        times = _interleaved(actions, self._repetitions, self._calls)
        rates = {name: self._calls / statistics.median(values) for name, values in times.items()}
        baseline = next(iter(actions))
        figures = [Figure(case, name, rate, "calls/s") for name, rate in rates.items()]
        for name in self._modules:
            goal = CALLS_GOAL if self._modules[name] is _own_dataproto else None
            ratio = rates[name] / rates[baseline]
            figures.append(Figure(case, f"{name} / {baseline}", ratio, "", goal, at_least=True))
        return figures


class RawWorker:
    """What one writes by hand with Ray."""

    def echo(self, value: Any) -> Any:
        return value

    def ping(self) -> None:
        return None


def _group(module: Any) -> Any:
    class Echo(module.Worker):  # type: ignore[misc]  # the base is the measured module's own
        @module.register(dispatch_mode=module.Dispatch.DP_COMPUTE_PROTO)
        def echo(self, batch: Any) -> Any:
            return batch

        @module.register(dispatch_mode=module.Dispatch.ONE_TO_ALL)
        def ping(self) -> None:
            return None

        @module.register(dispatch_mode=module.Dispatch.ONE_TO_ALL)
        def pid(self) -> int:
            return os.getpid()

    pool = module.RayResourcePool([2])
    return module.RayWorkerGroup(resource_pool=pool, ray_cls_with_init=module.RayClassWithInitArgs(Echo))


def _interleaved(actions: dict[str, Action], repetitions: int, calls: int) -> dict[str, list[float]]:
    """Seconds of ``calls`` calls of each action, in turns; the first turn is not counted."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    gc.collect()
    gc.disable()
    for turn in range(repetitions + 1):
        names = list(actions) if turn % 2 else list(reversed(actions))
        for name in names:
            start = time.perf_counter()
            for _ in range(calls):
                result = actions[name]()
            seconds = time.perf_counter() - start
            del result
            if turn:
                times[name].append(seconds)
    gc.enable()
    return times


def _object_array(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    return np.fromiter(values, dtype=object, count=len(values))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder for dataproto.json and dataproto.md")
    parser.add_argument("--peer", default="", help="module with the names of _own_dataproto.py, timed beside it")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--mib", type=float, default=96.0, help="size of all tensors together")
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--calls", type=int, default=100, help="small calls per repetition")
    return parser.parse_args()


if __name__ == "__main__":
    main()
