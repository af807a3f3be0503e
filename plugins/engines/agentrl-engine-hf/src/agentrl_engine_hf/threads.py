"""How many CPU threads compute a decode step."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

SMALL = 32_000_000
"""Parameters below which one thread decodes. The trainer's pool of threads and this one are more than there are cores,
so OpenMP wakes its threads anew for each of a step's hundreds of operations, which takes longer than a short one."""


def threads_for(module: Any, wanted: int) -> int:
    """``decode_threads`` for this model; 0 leaves the process's setting as it is."""
    if wanted or next(module.parameters()).device.type != "cpu":
        return wanted
    return 1 if sum(parameter.numel() for parameter in module.parameters()) < SMALL else 0


@contextlib.contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Computes with so many threads where ``count`` is not 0. Only the calling thread is concerned."""
    before = torch.get_num_threads()
    if count in (0, before):
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
