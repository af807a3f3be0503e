"""How many CPU threads the engine computes with."""

import threading
from typing import Any

import torch

SMALL = 32_000_000
"""Parameters below which one thread is enough. A decode step is hundreds of operations, each over before OpenMP has
woken a second thread. And a second pool of threads beside the trainer's is more threads than there are cores: OpenMP
then puts idle ones to sleep between two operations, and the update is slower for it."""


def use_cpu_threads(module: Any, wanted: int) -> None:
    """Set ``cpu_threads`` for this model in the calling thread, for good; other threads keep theirs."""
    if next(module.parameters()).device.type != "cpu":
        return
    if not wanted and sum(parameter.numel() for parameter in module.parameters()) < SMALL:
        wanted = 1
    if wanted:
        others = torch.get_num_threads()
        torch.set_num_threads(wanted)
        # A thread that has computed nothing yet takes the number that was set last, wherever that was.
        last = threading.Thread(target=torch.set_num_threads, args=(others,))
        last.start()
        last.join()
