"""Profiles of a process: a trace that Perfetto opens and, on CUDA, a snapshot of the memory."""

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_MOST_ALLOCATIONS = 1_000_000
_active: Any = None
"""A process can have one profiler; the first who asks for it names the files."""


def start_profile() -> bool:
    """Start the profiler of this process; False where it runs already."""
    global _active
    if _active is not None:
        return False
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.memory._record_memory_history(max_entries=_MOST_ALLOCATIONS)
    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    _active = profile(activities=activities, experimental_config=all_threads)
    _active.start()
    return True


def stop_profile(path: Path) -> None:
    """Stop it and write ``<path>.json.gz``, and on CUDA ``<path>.memory.pickle`` for ``pytorch.org/memory_viz``."""
    global _active
    profiler, _active = _active, None
    profiler.stop()
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(f"{path}.json.gz")
    if torch.cuda.is_available():
        torch.cuda.memory._dump_snapshot(f"{path}.memory.pickle")  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None)
