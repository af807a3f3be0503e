"""Processes that compute together, for tests: each is a rank of torch's default process group, over gloo.

results = on_ranks(2, train, path)        # train(rank, size, path) in each of two processes
"""

import pickle
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import wait
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from agentrl_core.engine_kit.ports import free_port

DEADLINE = 250.0
"""Seconds that one call may take."""


def on_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Results of ``function(rank, size, *args)`` on each rank; with one, in this process.

    ``function`` belongs to a module that other processes can import. They stay for the next call with as many.

    Raises:
        Exception: what the function raised on the lowest rank that failed, with the traceback as a note.
        TimeoutError: a rank has not answered.
    """
    return [function(0, 1, *args)] if size == 1 else _Ranks.of(size).run(function, args)


class _Ranks:
    """Processes that have imported torch: it takes longer than most of what they are asked to do."""

    _known: ClassVar[dict[int, "_Ranks"]] = {}

    def __init__(self, size: int) -> None:
        context, port = get_context("spawn"), free_port()
        self._ends, self._processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            self._ends.append(here)
            self._processes.append(context.Process(target=_serve, args=(rank, size, port, there), daemon=True))
            self._processes[-1].start()

    @classmethod
    def of(cls, size: int) -> "_Ranks":
        if size not in cls._known:
            cls._known[size] = cls(size)
        return cls._known[size]

    def run(self, function: Callable[..., Any], args: Any) -> list[Any]:
        answers: dict[int, tuple[Any, Exception | None]] = {}
        start, waiting = time.monotonic(), dict(enumerate(self._ends))
        try:
            for end in self._ends:
                # The path as it is now: it may have grown since these processes were started.
                end.send_bytes(pickle.dumps((sys.path, pickle.dumps((function, args)))))
            while waiting:
                # One that failed may keep the others waiting.
                left = DEADLINE + start - time.monotonic() if _failure(answers) is None else 5.0
                if not (ready := wait(waiting.values(), max(left, 0.0))):
                    raise _failure(answers) or TimeoutError(f"ranks {list(waiting)} have not answered")
                for rank in [rank for rank, end in waiting.items() if end in ready]:
                    end = waiting.pop(rank)
                    try:
                        answers[rank] = pickle.loads(end.recv_bytes())
                    except EOFError:
                        answers[rank] = None, ChildProcessError(f"rank {rank} of {len(self._ends)} has died")
            if (failure := _failure(answers)) is not None:
                raise failure
        except BaseException:
            # Those that are left may be in the middle of something.
            for process in self._processes:
                process.kill()
            del self._known[len(self._ends)]
            raise
        return [answers[rank][0] for rank in range(len(self._ends))]


def _failure(answers: dict[int, tuple[Any, Exception | None]]) -> Exception | None:
    found = [error for _, (_, error) in sorted(answers.items()) if error is not None]
    # A rank may die because another one failed.
    return next((error for error in found if not isinstance(error, ChildProcessError)), found[0] if found else None)


def _serve(rank: int, size: int, port: int, end: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    while True:
        sys.path[:], call = pickle.loads(end.recv_bytes())
        try:
            function, args = pickle.loads(call)
            answer = pickle.dumps((function(rank, size, *args), None))
        except Exception as error:  # noqa: BLE001 - it is raised where the results are asked for
            error.add_note(f"on rank {rank} of {size}:\n{traceback.format_exc()}")
            answer = pickle.dumps((None, error))
        end.send_bytes(answer)
